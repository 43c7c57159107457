"""Where two runs decide differently: the commands of both event logs side by side, machine by machine.

A decision is what a machine commands, without times and without what follows from times alone: which instance a request goes to,
which rows and chunks are run together, what is lent, whom an instance preempts, and how a request ends.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.eventlog import Replay, read_log
from experiments.explain import validate
from experiments.plan import plan_cluster
from perfmodel.cluster import Machines
from perfmodel.messages import (
    Address,
    Command,
    Event,
    Finish,
    IterationsDone,
    MessageReceived,
    MoveKvCache,
    Preempt,
    RequestArrived,
    Send,
    StartIterations,
    SubmitRequest,
    TimerFired,
    machine_name,
)


@dataclass(frozen=True)
class Decision:
    """kind: one word · what: in a line, equal where the decisions are · because: the event that led to it, and the state then."""

    t_s: float
    kind: str
    what: str
    because: str


Decisions = dict[str, list[Decision]]  # of each machine, in order


@dataclass(frozen=True)
class Divergence:
    """The first place where a machine decides differently. None: this run has no such decision any more."""

    machine: str
    number: int
    a: Decision | None
    b: Decision | None

    @property
    def t_s(self) -> float:
        return min(decision.t_s for decision in (self.a, self.b) if decision)


def decisions_of(log: Path) -> Decisions:
    """Replay a log and keep what was decided. Raises InputError for what is no event log."""
    header, lines = read_log(log)
    found: Decisions = defaultdict(list)

    def see(t_s: float, machine: Address, event: Event, commands: list[Command]) -> None:
        told = [pair for command in commands for pair in decided(command)]
        because = f"{heard(event)}{state_of(replay.machines, machine)}" if told else ""
        found[machine_name(machine)] += [Decision(t_s, kind, what, because) for kind, what in told]

    replay = Replay(plan_cluster(validate(header["config"], f"{log}, line 1")), see)
    replay.run(lines)
    return found


def state_of(machines: Machines, machine: Address) -> str:
    if machine < 0:
        return ""
    sample = machines.rmanagers[machine].sample()
    return f"; {sample.batch} rows, {sample.waiting} waiting, {sample.free_blocks} blocks free"


def decided(command: Command) -> Iterator[tuple[str, str]]:
    match command:
        case Send(receiver, SubmitRequest(request)):
            yield "dispatch", f"request {request.req_id} to {machine_name(receiver)}"
        case Send(receiver, MoveKvCache() as order):
            parts = ", ".join(f"{blocks} blocks to {machine_name(creditor)}" for creditor, _, blocks in order.parts)
            yield "lend", f"{order.kind}: of request {order.req_id} at {machine_name(receiver)} {parts}"
        case Send(receiver, Preempt() as order):
            yield "preempt", f"request {order.req_id} at {machine_name(receiver)}"
        case StartIterations():
            changed = [
                f"{name} {list(ids)}" for name, ids in (("with", command.joined), ("without", command.left)) if ids
            ]
            chunks = [f"tokens {c.prefix_tokens}+{c.tokens} of {c.req_id}" for c in command.chunks]
            if changed or chunks:  # else the same rows go on
                yield "batch", ", ".join([f"{command.decode_rows} rows", *changed, *chunks])
        case Finish(outcome):
            yield "end", f"request {outcome.req_id} {outcome.status}"
        case _:
            pass


def heard(event: Event) -> str:
    match event:
        case RequestArrived(request):
            return f"request {request.req_id} of {request.input_tokens} tokens arrived"
        case IterationsDone():
            return f"{event.num_iterations} iterations done, {list(event.finished_ids)} finished"
        case MessageReceived(sender, message):
            return f"{type(message).__name__} from {machine_name(sender)}"
        case TimerFired():
            return "its timer fired"
        case _:
            return type(event).__name__


def first_divergence(a: Decisions, b: Decisions) -> Divergence | None:
    """The earliest place where a machine of both runs decides differently; None where they never do."""
    places = [place for machine in a | b if (place := divergence_of(machine, a, b))]
    return min(places, key=lambda place: place.t_s, default=None)


def divergence_of(machine: str, a: Decisions, b: Decisions) -> Divergence | None:
    left, right = a.get(machine, []), b.get(machine, [])
    for number, (x, y) in enumerate(zip(left, right, strict=False)):
        if (x.kind, x.what) != (y.kind, y.what):
            return Divergence(machine, number, x, y)
    number = min(len(left), len(right))
    if len(left) == len(right):
        return None
    return Divergence(machine, number, *((side[number] if number < len(side) else None) for side in (left, right)))


def equal_shares(a: Decisions, b: Decisions) -> dict[str, tuple[float, int, int]]:
    """By kind: the share of decisions that both runs took, whenever they took them, and how many each took."""
    left, right = counts(a), counts(b)
    found = {}
    for kind in sorted(left | right):
        x, y = left.get(kind, Counter()), right.get(kind, Counter())
        found[kind] = ((x & y).total() / max(x.total(), y.total()), x.total(), y.total())
    return found


def counts(decisions: Decisions) -> dict[str, Counter[tuple[str, str]]]:
    """How often each machine decided what, by kind."""
    found: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for machine, taken in decisions.items():
        for decision in taken:
            found[decision.kind][machine, decision.what] += 1
    return found
