"""What a driver needs to carry out a run: the cluster, its policies and its workload, all as objects."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from perfmodel.batching import BatchingPolicy, BatchLimits
from perfmodel.borrower import MIN_LOCAL_BLOCKS
from perfmodel.cost import CostModel
from perfmodel.dispatcher import Dispatcher, DispatchPolicy
from perfmodel.gmanager import ClusterFacts, GManager
from perfmodel.messages import DISPATCHER, GMANAGER, Address
from perfmodel.rmanager import InstanceLimits, RManager
from perfmodel.specs import InstanceSpec, LinkSpec
from perfmodel.view import PlacementPolicy, SchedulerParams


@dataclass(frozen=True, slots=True)
class ChaosParams:
    """Faults to inject, drawn from the run's seed. Control messages between managers are delayed by up to `delay_s` more, and
    with these probabilities overtaken (`reorder`), sent twice or lost; what clients and the dispatcher say is reliable.

    kill: (time, instance or GMANAGER, time of return or infinity) · accuse: (time, instance): all are told that it is lost, though
    it lives · detect_s: until peers are told of a loss · drift_frac: clocks run fast or slow by up to this.
    """

    delay_s: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    loss: float = 0.0
    kill: tuple[tuple[float, int, float], ...] = ()
    accuse: tuple[tuple[float, int], ...] = ()
    detect_s: float = 1.0
    drift_frac: float = 0.0


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
    placement: Callable[[], PlacementPolicy] | None = None
    scheduler: SchedulerParams = field(default_factory=SchedulerParams)
    chaos: ChaosParams | None = None
    max_batch: int | None = None
    headroom_frac: float = 0.01
    macro: bool = True
    seed: int = 0
    sample_s: float = 1.0

    @property
    def headroom_blocks(self) -> int:
        return headroom_blocks(self.num_blocks, self.headroom_frac)

    @property
    def largest_blocks(self) -> int:
        """Blocks that one request can have."""
        return largest_blocks(self.num_blocks, self.num_instances if self.placement else 1, self.headroom_frac)

    def link(self, a: int, b: int) -> LinkSpec:
        """The link between two instances."""
        return self.instance.intra_link if self.nodes[a] == self.nodes[b] else self.instance.inter_link


def headroom_blocks(num_blocks: int, headroom_frac: float) -> int:
    """Blocks of an instance that are kept back for growth."""
    return int(headroom_frac * num_blocks)


def largest_blocks(num_blocks: int, sharing: int, headroom_frac: float) -> int:
    """Blocks that one request can have where `sharing` instances of `num_blocks` lend to each other: its own instance's, and
    those of the others up to their headroom."""
    if num_blocks < MIN_LOCAL_BLOCKS:
        return num_blocks
    return num_blocks + (sharing - 1) * (num_blocks - headroom_blocks(num_blocks, headroom_frac))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival; req_id is the index. Output lengths are the driver's secret.

    arrival_s, input_tokens, output_tokens: arrays of one length. With `users`, arrivals are closed-loop: each user sends its
    next request `think_s[req_id]` after its last one ended, and `arrival_s` is ignored.
    window_kind: "arrivals" (steady window by arrivals) or "finishes" (closed and saturated workloads).
    patience_s: how long after its arrival each request's client goes away, if it has not ended (infinite: never).
    """

    arrival_s: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    users: int | None = None
    think_s: npt.NDArray[np.float64] | None = None
    window_kind: str = "arrivals"
    patience_s: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.input_tokens)


Machine = Dispatcher | GManager | RManager


@dataclass(slots=True)
class Machines:
    """The machines of one run. `gmanager` None: a system that shares nothing."""

    spec: ClusterSpec
    dispatcher: Dispatcher
    rmanagers: list[RManager]
    gmanager: GManager | None

    def __getitem__(self, address: Address) -> Machine:
        if address >= 0:
            return self.rmanagers[address]
        if address == GMANAGER:
            assert self.gmanager is not None
            return self.gmanager
        return self.dispatcher

    def addresses(self) -> list[Address]:
        managers = [GMANAGER] if self.gmanager else []
        return [DISPATCHER, *managers, *range(len(self.rmanagers))]

    @property
    def at_rest(self) -> bool:
        return all(manager.at_rest for manager in self.rmanagers)

    def restart(self, machine: Address, now_s: float) -> None:
        """An instance, or the gManager, is back: empty, under a new incarnation."""
        if machine >= 0:
            incarnation = self.rmanagers[machine].incarnation + 1
            self.rmanagers[machine] = build_rmanager(self.spec, machine, incarnation, now_s)
        elif self.gmanager is not None:
            self.gmanager = build_gmanager(self.spec, self.gmanager.incarnation + 1, now_s)

    def check_invariants(self) -> None:
        for address in self.addresses():
            self[address].check_invariants()


def build_machines(spec: ClusterSpec) -> Machines:
    """The core of a run, in its initial state."""
    return Machines(
        spec,
        build_dispatcher(spec),
        [build_rmanager(spec, i, 1, 0.0) for i in range(spec.num_instances)],
        build_gmanager(spec, 1, 0.0) if spec.placement else None,
    )


def build_dispatcher(spec: ClusterSpec) -> Dispatcher:
    return Dispatcher(spec.num_instances, spec.instance.block_tokens, spec.dispatch())


def build_rmanager(spec: ClusterSpec, instance: int, incarnation: int, now_s: float) -> RManager:
    batch = BatchLimits(spec.instance.block_tokens, spec.token_budget, spec.max_batch, spec.headroom_blocks)
    scheduler = spec.scheduler if spec.placement else None
    limits = InstanceLimits(spec.num_blocks, batch, spec.macro, spec.largest_blocks, scheduler)
    return RManager(instance, limits, spec.batching(), incarnation, now_s)


def build_gmanager(spec: ClusterSpec, incarnation: int, now_s: float) -> GManager:
    assert spec.placement is not None
    facts = ClusterFacts(spec.num_instances, spec.instance.block_tokens, spec.belief, spec.link)
    return GManager(facts, spec.scheduler, spec.placement(), incarnation, now_s)
