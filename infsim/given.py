"""A simulation under measured times: what does it decide, where iterations and copies take as long as they did in a recorded run?

What is left of the difference between the two is then not the cost model's.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.eventlog import Replay
from infsim.executor import Executor
from infsim.links import Links
from infsim.transfers import Transfer, Transfers
from perfmodel.cluster import ClusterSpec
from perfmodel.cost import CostModel
from perfmodel.messages import (
    Address,
    Command,
    Event,
    IterationsDone,
    LoanId,
    PostReceive,
    StartFetch,
    StartIterations,
    TransferDone,
    TransferId,
)
from perfmodel.pricing import Surroundings
from perfmodel.records import RunResult
from perfmodel.steptime import StepTime

WIDE_BYTES_PER_S = 1e18  # of a link that hinders nothing


@dataclass
class GivenStep:
    """A step as it was recorded. ends_s: when its iterations had ended, since its start; those not reported one by one are spread
    evenly. alone_s: the same without waits for other instances. last_s: by the number of iterations done, the duration that was
    reported of the last."""

    command: StartIterations
    start_s: float
    ends_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    last_s: dict[int, float] = field(default_factory=dict)

    def report(self, done: IterationsDone, t_s: float) -> None:
        """More iterations have ended."""
        spent_s = t_s - self.start_s - (self.ends_s[-1] if self.ends_s else 0.0)
        extend(self.ends_s, spent_s, done.num_iterations)
        extend(self.alone_s, spent_s - done.remote_wait_s, done.num_iterations)
        self.last_s[len(self.ends_s)] = done.iteration_s

    def is_same(self, step: StartIterations) -> bool:
        """Whether a step runs the same batch, so that the times are its own."""
        mine = self.command
        return (mine.decode_rows, mine.decode_context_tokens, mine.chunks) == (
            step.decode_rows,
            step.decode_context_tokens,
            step.chunks,
        )


def extend(ends_s: list[float], spent_s: float, num: int) -> None:
    """`num` more iterations, of `spent_s` together."""
    before_s = ends_s[-1] if ends_s else 0.0
    ends_s += [before_s + spent_s * (i + 1) / num for i in range(num)]


@dataclass
class GivenTimes:
    """Of a recorded run: instance → step number → the step; (transfer, loan) → seconds in which its data flowed."""

    steps: dict[int, dict[int, GivenStep]] = field(default_factory=dict)
    transfers: dict[tuple[TransferId, LoanId], float] = field(default_factory=dict)


def read_times(spec: ClusterSpec, lines: Iterable[dict[str, Any]]) -> tuple[GivenTimes, RunResult]:
    """The times in an event log, and the run that it tells of."""
    times = GivenTimes()
    flowing: dict[tuple[TransferId, LoanId], float] = {}

    def see(t_s: float, machine: Address, event: Event, commands: list[Command]) -> None:
        if isinstance(event, IterationsDone) and event.num_iterations:
            times.steps[machine][event.step].report(event, t_s)
        elif isinstance(event, TransferDone) and event.ok:
            key = (event.transfer, event.loan)
            if key in flowing:
                times.transfers[key] = t_s - flowing.pop(key)
        for command in commands:
            if isinstance(command, StartIterations):
                times.steps.setdefault(machine, {})[command.step] = GivenStep(command, t_s)
            elif isinstance(command, PostReceive | StartFetch):
                flowing[command.transfer, command.loan] = t_s

    result = Replay(spec, see).run(lines)
    return times, result


class GivenTime(StepTime):
    """Ends of iterations as they were recorded."""

    def __init__(self, ends_s: Sequence[float]) -> None:
        self._ends_s = [0.0, *ends_s]

    def duration_s(self, j: int) -> float:
        return self._ends_s[j + 1] - self._ends_s[j]

    def total_s(self, iterations: int) -> float:
        return self._ends_s[iterations]

    def completed(self, elapsed_s: float, limit: int) -> int:
        return min(limit, bisect_right(self._ends_s, elapsed_s) - 1)


class GivenExecutor(Executor):
    """Steps that were recorded take their own times and end where they ended."""

    def __init__(self, cost: CostModel, given: Mapping[int, GivenStep]) -> None:
        super().__init__(cost)
        self._given = given
        self._recorded: GivenStep | None = None  # of the step in progress

    def start(self, step: StartIterations, now_s: float, around: Surroundings) -> None:
        super().start(step, now_s, around)
        assert self._price is not None
        given = self._given.get(step.step)
        self._recorded = given if given and given.ends_s and given.is_same(step) else None
        if self._recorded:
            time, alone = (GivenTime(ends_s) for ends_s in (self._recorded.ends_s, self._recorded.alone_s))
            self._price = self._price._replace(time=time, alone=alone)
            self.end_iterations = min(self.end_iterations, len(self._recorded.ends_s))

    def _report(self, iterations: int, ended: bool) -> IterationsDone:
        done = super()._report(iterations, ended)
        last_s = self._recorded.last_s.get(iterations) if self._recorded else None
        return done if last_s is None else done._replace(iteration_s=last_s)


class GivenTransfers(Transfers):
    """Copies of blocks at the rate at which they were recorded, whatever else is on the links; others as if alone there."""

    def __init__(
        self,
        spec: ClusterSpec,
        rate_cap: Callable[[int, int], float],
        given: Mapping[tuple[TransferId, LoanId], float],
    ) -> None:
        instance = spec.instance
        wide = [replace(link, bytes_per_s=WIDE_BYTES_PER_S) for link in (instance.intra_link, instance.inter_link)]
        super().__init__(Links(spec.nodes, instance.num_gpus, *wide), instance.block_bytes, rate_cap)
        self._link, self._given = spec.link, given

    def _flow(self, transfer: Transfer, now_s: float) -> None:
        link = self._link(transfer.src, transfer.dst)
        seconds = self._given.get((transfer.transfer, transfer.loan), 0.0) - link.latency_s
        given = transfer.num_blocks * self._block_bytes / seconds if seconds > 0 else link.bytes_per_s
        transfer.rate_cap = given if seconds > 0 else min(transfer.rate_cap, given)
        super()._flow(transfer, now_s)
