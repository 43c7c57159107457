"""Dispatcher: takes requests in, sends each to an instance, and knows which attempt of a request counts.

Owns requests that are not delivered yet and its own view of each instance's load: what the instance last reported, plus what
was sent since. It never looks into an instance. A request whose instance is lost is sent to another one as a new attempt; only
the current attempt can end it.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from perfmodel.errors import InputError
from perfmodel.messages import (
    AbortRequest,
    Command,
    Event,
    Finish,
    LoadReport,
    MessageReceived,
    PeerLost,
    PeerReturned,
    Request,
    RequestAborted,
    RequestArrived,
    RequestDone,
    RequestOutcome,
    Send,
    SubmitRequest,
)

GROUP = 32  # instances whose least load is remembered


@dataclass(slots=True)
class DispatchView:
    """What a dispatch policy may see. load_blocks: KV blocks of running and waiting work of each instance (may be stale);
    infinite where an instance is lost."""

    num_instances: int
    block_tokens: int
    load_blocks: list[float]
    _least: list[float] = field(init=False)  # of each group

    def __post_init__(self) -> None:
        self._least = [min(self.load_blocks[i : i + GROUP]) for i in range(0, self.num_instances, GROUP)]

    def set_load(self, instance: int, blocks: float) -> None:
        group, before = instance // GROUP, self.load_blocks[instance]
        self.load_blocks[instance] = blocks
        if blocks < self._least[group]:
            self._least[group] = blocks
        elif before == self._least[group]:
            self._least[group] = min(self.load_blocks[group * GROUP : (group + 1) * GROUP])

    def least_loaded(self, first: int = 0) -> int:
        """The instance of the least load; among equals the next one from `first` on, in a circle."""
        least = min(self._least)
        found = self._find(least, first, self.num_instances)
        return found if found >= 0 else self._find(least, 0, first)

    def _find(self, load: float, begin: int, end: int) -> int:
        """The first of the instances begin … end − 1 with this load, the least of all; −1 where there is none."""
        for group in range(begin // GROUP, -(-end // GROUP)):
            if self._least[group] == load:
                part = slice(max(begin, group * GROUP), min(end, (group + 1) * GROUP))
                if load in self.load_blocks[part]:
                    return self.load_blocks.index(load, part.start, part.stop)
        return -1


class DispatchPolicy(Protocol):
    """Decides where a request goes."""

    def choose(self, view: DispatchView, request: Request) -> int: ...


@dataclass(slots=True)
class _Open:
    """A request that has not ended. instance None: no instance is alive to take it. aborted: its client has gone away."""

    request: Request
    sequence: int
    attempt: int = 0
    instance: int | None = None
    aborted: bool = False


class Dispatcher:
    """One per cluster."""

    def __init__(self, num_instances: int, block_tokens: int, policy: DispatchPolicy) -> None:
        self.view = DispatchView(num_instances, block_tokens, [0.0] * num_instances)
        self.policy = policy
        self._sequence = 0
        self._sent = [0] * num_instances
        self._incarnations = [1] * num_instances
        self._unreported: list[deque[tuple[int, int]]] = [deque() for _ in range(num_instances)]  # (nth sent, blocks)
        self._open: dict[int, _Open] = {}
        self._lost: dict[int, list[AbortRequest]] = {}  # lost instance → its attempts that no longer count

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case RequestArrived(request):
                self._sequence += 1
                self._open[request.req_id] = _Open(request, self._sequence)
                return self._dispatch(self._open[request.req_id])
            case MessageReceived(sender, RequestDone() as done):
                return self._end(sender, done)
            case MessageReceived(sender, LoadReport() as report):
                self._note_load(sender, report)
                return []
            case RequestAborted(req_id):
                return self._abort(req_id, now_s)
            case PeerLost(peer):
                return self._lose(peer, now_s)
            case PeerReturned(peer, incarnation):
                return self._take_back(peer, incarnation, now_s)
        raise AssertionError(f"the dispatcher does not know {event}")

    def next_deadline_s(self) -> float:
        return float("inf")

    def check_invariants(self) -> None:
        assert all(load >= 0 for load in self.view.load_blocks), self.view.load_blocks
        assert self.view.load_blocks[self.view.least_loaded()] == min(self.view.load_blocks)

    def _dispatch(self, held: _Open) -> list[Command]:
        if len(self._lost) == self.view.num_instances:
            held.instance = None
            return []
        instance = self._choose(held.request)
        blocks = held.request.input_tokens // self.view.block_tokens + 1
        self._sent[instance] += 1
        self._unreported[instance].append((self._sent[instance], blocks))
        self.view.set_load(instance, self.view.load_blocks[instance] + blocks)
        held.instance, held.attempt = instance, held.attempt + 1
        return [Send(instance, SubmitRequest(held.request, held.attempt, held.sequence))]

    def _choose(self, request: Request) -> int:
        """Ask the policy; a lost instance is passed over for the next live one."""
        count = self.view.num_instances
        instance = self.policy.choose(self.view, request)
        if not isinstance(instance, int) or not 0 <= instance < count:
            raise InputError(
                f"dispatch policy {type(self.policy).__name__} sent request {request.req_id} to instance {instance!r} "
                f"(allowed: 0 to {count - 1})"
            )
        return next(i % count for i in range(instance, instance + count) if i % count not in self._lost)

    def _note_load(self, instance: int, report: LoadReport) -> None:
        unreported = self._unreported[instance]
        while unreported and unreported[0][0] <= report.received:
            unreported.popleft()
        if instance not in self._lost:
            self.view.set_load(instance, report.load_blocks + sum(blocks for _, blocks in unreported))

    def _end(self, instance: int, done: RequestDone) -> list[Command]:
        self._note_load(instance, done.load)
        held = self._open.get(done.outcome.req_id)
        if held is None or held.attempt != done.attempt:
            return []
        del self._open[done.outcome.req_id]
        return [Finish(done.outcome)]

    def _abort(self, req_id: int, now_s: float) -> list[Command]:
        """Its instance ends the attempt, unless it is lost before it could: then nobody is to try again."""
        held = self._open.get(req_id)
        if held is None:
            return []
        held.aborted = True
        if held.instance is None:
            return [self._end_aborted(held, now_s)]
        return [Send(held.instance, AbortRequest(req_id, held.attempt))]

    def _end_aborted(self, held: _Open, now_s: float) -> Command:
        req_id = held.request.req_id
        del self._open[req_id]
        reason = "aborted by the client"
        return Finish(RequestOutcome(req_id, "aborted", reason, None, 0, now_s, None, None, finish_s=now_s))

    def _lose(self, instance: int, now_s: float) -> list[Command]:
        if instance in self._lost:
            return []
        moved = [held for held in self._open.values() if held.instance == instance]
        self._lost[instance] = [AbortRequest(held.request.req_id, held.attempt) for held in moved]
        self._sent[instance] = 0
        self._unreported[instance].clear()
        self.view.set_load(instance, float("inf"))
        ended = [self._end_aborted(held, now_s) for held in moved if held.aborted]
        return ended + [command for held in moved if not held.aborted for command in self._dispatch(held)]

    def _take_back(self, instance: int, incarnation: int, now_s: float) -> list[Command]:
        if instance not in self._lost and incarnation == self._incarnations[instance]:
            return []
        resent = self._lose(instance, now_s)  # nothing to do where its loss was noticed
        self._incarnations[instance] = incarnation
        stale = self._lost.pop(instance)
        self.view.set_load(instance, 0.0)
        commands: list[Command] = [Send(instance, abort) for abort in stale]  # it may have been alive all the time
        undelivered = [held for held in self._open.values() if held.instance is None]
        return resent + commands + [command for held in undelivered for command in self._dispatch(held)]
