"""What a driver needs to carry out a run: the cluster, its policies and its workload, all as objects."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from perfmodel.batching import BatchingPolicy, BatchLimits
from perfmodel.cost import CostModel
from perfmodel.dispatcher import Dispatcher, DispatchPolicy
from perfmodel.messages import DISPATCHER, Address
from perfmodel.rmanager import InstanceLimits, RManager
from perfmodel.specs import InstanceSpec


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster of equal instances. `num_blocks` is the KV capacity of one; policies are made fresh by calling them.

    nodes: node index of each instance's first GPU · headroom_frac: share of an instance's blocks kept back for growth ·
    macro: whether a step may hold more than one iteration · sample_s: period of the instance samples.
    """

    instance: InstanceSpec
    num_instances: int
    nodes: tuple[int, ...]
    num_blocks: int
    token_budget: int
    dispatch: Callable[[], DispatchPolicy]
    batching: Callable[[], BatchingPolicy]
    belief: CostModel
    truth: CostModel
    max_batch: int | None = None
    headroom_frac: float = 0.01
    macro: bool = True
    seed: int = 0
    sample_s: float = 1.0

    @property
    def headroom_blocks(self) -> int:
        return int(self.headroom_frac * self.num_blocks)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival; req_id is the index. Output lengths are the driver's secret.

    arrival_s, input_tokens, output_tokens: arrays of one length. With `users`, arrivals are closed-loop: each user sends its
    next request `think_s[req_id]` after its last one ended, and `arrival_s` is ignored.
    window_kind: "arrivals" (steady window by arrivals) or "finishes" (closed and saturated workloads).
    """

    arrival_s: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    users: int | None = None
    think_s: npt.NDArray[np.float64] | None = None
    window_kind: str = "arrivals"

    def __len__(self) -> int:
        return len(self.input_tokens)


@dataclass(slots=True)
class Machines:
    """Fresh machines of one run."""

    dispatcher: Dispatcher
    rmanagers: list[RManager] = field(default_factory=list)

    def __getitem__(self, address: Address) -> Dispatcher | RManager:
        return self.dispatcher if address == DISPATCHER else self.rmanagers[address]

    def addresses(self) -> list[Address]:
        return [DISPATCHER, *range(len(self.rmanagers))]

    def check_invariants(self) -> None:
        self.dispatcher.check_invariants()
        for manager in self.rmanagers:
            manager.check_invariants()


def build_machines(spec: ClusterSpec) -> Machines:
    """The core of a run, in its initial state."""
    batch = BatchLimits(spec.instance.block_tokens, spec.token_budget, spec.max_batch, spec.headroom_blocks)
    limits = InstanceLimits(spec.num_blocks, batch, spec.macro)
    return Machines(
        Dispatcher(spec.num_instances, spec.instance.block_tokens, spec.dispatch()),
        [RManager(i, limits, spec.batching()) for i in range(spec.num_instances)],
    )
