"""The data plane between instances: messages into buffers that were posted for them, byte counters, deadlines.

One interface, three carriers: in one process (`in_process`, deterministic, for tests, for the rivals, and for one GPU that several
instances share), between processes (`gloo`), and between GPUs (`nccl`, over gloo). What travels (queries, partial states, KV
blocks) is no concern of a transport. Control messages do not come this way.

Rules that every carrier keeps:
- Receives for one (peer, tag) match sends for it in order; different tags do not wait for one another.
- A posted buffer belongs to the transport until its wait returns; a sent buffer is free again when `send` returns.
- After a time-out the pair with that peer is broken: sending and posting raise until both sides have called `reset`.
  Nothing of before a reset is delivered after it. Between processes a side may notice late that the other has reset: what it sends
  until then is lost.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class TransportError(RuntimeError):
    """An exchange that did not take place. The message names both ranks and the tag; peer: whose fault it may be, where known."""

    peer: int | None = None


class DeadlineExceeded(TransportError):
    """The peer did not deliver in time."""


class PeerLost(TransportError):
    """The peer is gone for good."""


class PairReset(TransportError):
    """The pair was reset while this exchange was under way, or is broken and wants a reset."""


@dataclass
class Traffic:
    """Payload bytes and messages by peer, since the transport was made."""

    sent_bytes: dict[int, int] = field(default_factory=dict)
    received_bytes: dict[int, int] = field(default_factory=dict)
    sent_messages: dict[int, int] = field(default_factory=dict)

    def count_sent(self, peer: int, num_bytes: int) -> None:
        self.sent_bytes[peer] = self.sent_bytes.get(peer, 0) + num_bytes
        self.sent_messages[peer] = self.sent_messages.get(peer, 0) + 1

    def count_received(self, peer: int, num_bytes: int) -> None:
        self.received_bytes[peer] = self.received_bytes.get(peer, 0) + num_bytes


def lane_of(tag: int) -> int:
    """Lane of a message, from bit 1 of its tag. 0: what somebody waits for · 1: bulk, which must never sit in front of it."""
    return tag >> 1 & 1


class Transport(Protocol):
    """One instance's end. `peer` is a rank; a `tag` is any int, agreed between the two."""

    rank: int
    traffic: Traffic

    def post_recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Any:
        """Offers a dense buffer for the next message of this peer and tag; returns the handle to wait for."""

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> None:
        """Sends a dense buffer; does not wait for the peer to post. Raises `PeerLost` or `PairReset`."""

    def wait(self, handle: Any, deadline_s: float) -> None:
        """Returns when the posted buffer is filled. deadline_s: a point of `time.monotonic`, so that waits can share one.

        Raises `DeadlineExceeded`, `PeerLost`, `PairReset`, or `TransportError` for a message of another size or dtype.
        """

    def reset(self, peer: int) -> None:
        """Drops whatever is posted, queued or under way with this peer and joins the pair's next generation."""
