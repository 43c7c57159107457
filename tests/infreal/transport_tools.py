"""Networks of endpoints over each carrier."""

from dataclasses import dataclass
from functools import cache
from itertools import count
from threading import Lock
from time import sleep

from torch.distributed import PrefixStore, TCPStore

from infreal.transport.gloo import GlooTransport
from infreal.transport.in_process import InProcessNetwork
from infreal.transport.nccl import NcclTransport

LOCAL = "127.0.0.1"
numbers = count()


@cache
def store_of(rank):
    """A rank's own connection to a store, as it has in another process. They last: to make one takes seconds now and then."""
    if rank == 0:
        return TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
    return TCPStore(LOCAL, store_of(0).port, is_master=False)


class GlooNetwork:
    """All ranks in this process, over loopback; kill: as `InProcessNetwork`'s."""

    def __init__(self, num_ranks):
        name = str(next(numbers))
        stores = [PrefixStore(name, store_of(rank)) for rank in range(num_ranks)]
        self.endpoints = [GlooTransport(rank, num_ranks, store) for rank, store in enumerate(stores)]

    def kill(self, rank):
        self.endpoints[rank].close()


class Wire:
    """In NCCL's place, one communicator: made when both sides have come; no tags, operations of the two sides meet in the order in
    which they start, and one of another size is an error. held: it does not get on · journal: (name, "send" or
    "recv", size) of each."""

    def __init__(self, name, journal):
        self.name, self.journal, self.lock = name, journal, Lock()
        self.sides, self.held, self.aborted, self.present = ([], []), False, False, set()

    def start(self, side, kind, buffer):
        self.present.add(side)
        while len(self.present) < 2 and not self.aborted:
            sleep(0.0005)
        with self.lock:
            self.journal.append((self.name, kind, buffer.numel()))
            mine, theirs = self.sides[side], self.sides[1 - side]
            work = Operation(self, buffer)
            mine.append(work)
            if len(theirs) >= len(mine) and not self.held:
                source, target = (work, theirs[len(mine) - 1])[:: 1 if side == 0 else -1]
                assert (source.buffer.shape.numel(), source.buffer.dtype) == (
                    target.buffer.numel(),
                    target.buffer.dtype,
                )
                target.buffer.view(-1).copy_(source.buffer.view(-1))
                source.done = target.done = True
            return work


@dataclass
class Operation:
    wire: Wire
    buffer: object
    done: bool = False

    def is_completed(self):
        return self.done and not self.wire.aborted


@dataclass
class WireEnd:
    wire: Wire
    side: int

    def send(self, tensors, rank, tag):
        assert (self.side, rank) == (0, 1)
        return self.wire.start(0, "send", tensors[0])

    def recv(self, tensors, rank, tag):
        assert (self.side, rank) == (1, 0)
        return self.wire.start(1, "recv", tensors[0])

    def abort(self):
        self.wire.aborted = True


class NcclNetwork:
    """Headers in this process, wires for everything else. delays_s: until a sender, and a receiver, comes to a wire."""

    delays_s = (0.0, 0.0)

    def __init__(self, num_ranks):
        self.below, self.wires, self.journal, self.lock = InProcessNetwork(num_ranks), {}, [], Lock()
        self.endpoints = [NcclTransport(end, self.join, "cpu", lambda buffer: True) for end in self.below.endpoints]

    def join(self, name, side):
        sleep(self.delays_s[side])
        with self.lock:
            return WireEnd(self.wires.setdefault(name, Wire(name, self.journal)), side)

    def kill(self, rank):
        self.below.kill(rank)


CARRIERS = {"in_process": InProcessNetwork, "gloo": GlooNetwork, "nccl": NcclNetwork}
