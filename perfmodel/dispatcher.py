"""Dispatcher: takes requests in, sends each to an instance, and knows which attempt of a request counts.

Owns requests that are not delivered yet and its own view of each instance's load: what the instance last reported, plus what
was sent since. It never looks into an instance.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from perfmodel.errors import InputError
from perfmodel.messages import (
    AbortRequest,
    Command,
    Event,
    MessageReceived,
    Request,
    RequestAborted,
    RequestArrived,
    RequestDone,
    Send,
    SubmitRequest,
)


@dataclass(slots=True)
class DispatchView:
    """What a dispatch policy may see. load_blocks: KV blocks of running and waiting work of each instance (may be stale)."""

    num_instances: int
    block_tokens: int
    load_blocks: list[float]


class DispatchPolicy(Protocol):
    """Decides where a request goes."""

    def choose(self, view: DispatchView, request: Request) -> int: ...


class Dispatcher:
    """One per cluster."""

    def __init__(self, num_instances: int, block_tokens: int, policy: DispatchPolicy) -> None:
        self.view = DispatchView(num_instances, block_tokens, [0.0] * num_instances)
        self.policy = policy
        self._sequence = 0
        self._sent = [0] * num_instances
        self._unreported: list[deque[tuple[int, int]]] = [deque() for _ in range(num_instances)]  # (nth sent, blocks)
        self._instance: dict[int, int] = {}

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case RequestArrived(request):
                return [self._dispatch(request)]
            case MessageReceived(sender, RequestDone() as done):
                self._note_done(sender, done)
                return []
            case RequestAborted(req_id) if req_id in self._instance:
                return [Send(self._instance[req_id], AbortRequest(req_id))]
            case RequestAborted():
                return []
        raise AssertionError(f"the dispatcher does not know {event}")

    def next_deadline_s(self) -> float:
        return float("inf")

    def check_invariants(self) -> None:
        assert all(load >= 0 for load in self.view.load_blocks), self.view.load_blocks

    def _dispatch(self, request: Request) -> Command:
        instance = self.policy.choose(self.view, request)
        if not isinstance(instance, int) or not 0 <= instance < self.view.num_instances:
            raise InputError(
                f"dispatch policy {type(self.policy).__name__} sent request {request.req_id} to instance {instance!r} "
                f"(allowed: 0 to {self.view.num_instances - 1})"
            )
        blocks = request.input_tokens // self.view.block_tokens + 1
        self._sent[instance] += 1
        self._unreported[instance].append((self._sent[instance], blocks))
        self.view.load_blocks[instance] += blocks
        self._instance[request.req_id] = instance
        self._sequence += 1
        return Send(instance, SubmitRequest(request, attempt=1, sequence=self._sequence))

    def _note_done(self, instance: int, done: RequestDone) -> None:
        self._instance.pop(done.req_id, None)
        unreported = self._unreported[instance]
        while unreported and unreported[0][0] <= done.received:
            unreported.popleft()
        self.view.load_blocks[instance] = done.load_blocks + sum(blocks for _, blocks in unreported)
