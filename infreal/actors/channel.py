"""Orders and reports between the ranks of one instance, over a transport of their own.

An item is one frame of fixed size, so that nobody has to say first how long it is; what does not fit follows in a second message.
"""

import io
import pickle
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch

from infreal.transport import Transport

LENGTH_BYTES, ROOM_BYTES = 8, 2040  # of a frame
FRAME, REST = 0, 1  # tags
FOREVER_S = 1e7
MODULES = ("infreal.actors.orders", "infreal.layout", "perfmodel.messages")  # items are made of their classes


class Channel:
    """One rank's end. Threads may send; one thread for each peer receives."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self._transport, self._lock = transport, threading.Lock()

    def send(self, peers: Iterable[int], item: Any) -> None:
        """Does not wait for anybody. Raises TransportError where one is gone."""
        data = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
        frame = len(data).to_bytes(LENGTH_BYTES) + data[:ROOM_BYTES].ljust(ROOM_BYTES)
        messages = [(FRAME, as_tensor(frame))]
        if len(data) > ROOM_BYTES:
            messages.append((REST, as_tensor(data[ROOM_BYTES:])))
        with self._lock:  # one order of items for all
            for peer in peers:
                for tag, message in messages:
                    self._transport.send(peer, tag, message)

    def receive(self, peer: int, patience_s: float = FOREVER_S) -> Any:
        """The peer's next item. Raises TransportError where none comes, UnpicklingError for one that is no order or report."""
        frame = self._receive(peer, FRAME, LENGTH_BYTES + ROOM_BYTES, patience_s)
        length, data = int.from_bytes(frame[:LENGTH_BYTES]), frame[LENGTH_BYTES:]
        if length > ROOM_BYTES:
            data += self._receive(peer, REST, length - ROOM_BYTES, patience_s)
        return Items(io.BytesIO(data[:length])).load()

    def _receive(self, peer: int, tag: int, num_bytes: int, patience_s: float) -> bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self._transport.wait(self._transport.post_recv(peer, tag, buffer), time.monotonic() + patience_s)
        return buffer.numpy().tobytes()


class Items(pickle.Unpickler):
    """Makes nothing but orders and reports, whoever has sent the bytes."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that one of these modules defines: what it imports, and what hangs on it, could be called to any end."""
        found = super().find_class(module, name) if module in MODULES and "." not in name else None
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an order")
        return found


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
