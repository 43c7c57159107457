"""The ranks of one instance as its model sees them: two collectives, which all ranks call in the same order, one at a time.

`ALONE` is the group of an instance on one GPU and costs nothing. `DistributedGroup` goes over a process group of torch.distributed,
made from a store and registered nowhere, so that several ranks may live in one process. Over NCCL it is the same code; untested on
hardware, as there was no machine with several GPUs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, Store
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from infreal.transport import TransportError
from infreal.transport.connecting import PatientStore, device_maker, make_group
from infreal.transport.lane import close_group


class GroupLost(TransportError):
    """A rank of this instance did not come, is gone or is late: the group is of no use any more."""


class Group(Protocol):
    """One rank's end. Every wait has a deadline; raises GroupLost."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; x: dense, of one shape and dtype on all of them."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`[size, *x.shape]`: what each rank has; x as for `all_reduce`."""


@dataclass(frozen=True, slots=True)
class Alone:
    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)


ALONE = Alone()


class DistributedGroup:
    """A group over a ProcessGroupGloo or ProcessGroupNCCL; timeout_s: the longest that a rank waits for the others."""

    def __init__(self, rank: int, size: int, process_group: Any, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._process_group, self._timeout = process_group, timedelta(seconds=timeout_s)
        self._reduce, self._gather = AllreduceOptions(), AllgatherOptions()
        self._reduce.timeout = self._gather.timeout = self._timeout

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._finish(lambda: self._process_group.allreduce([x], self._reduce))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self.size * x.numel())
        self._finish(lambda: self._process_group._allgather_base(out, x.view(-1), self._gather))
        return out.view(self.size, *x.shape)

    def close(self) -> None:
        """Ranks that wait for this one, now or later, get GroupLost."""
        if self._process_group.name() != "gloo":
            self._process_group.abort()
            return
        for peer in range(self.size):
            if peer != self.rank:
                close_group(self._process_group, peer)

    def _finish(self, start: Callable[[], Any]) -> None:
        """A rank that fails closes its end: those that wait for it alone would not see what it has seen."""
        try:
            start().wait(self._timeout)
        except RuntimeError as error:
            self.close()
            raise lost(self.rank, self.size, error) from None


def join_group(
    store: Store, rank: int, size: int, timeout_s: float, *, backend: str = "gloo", host: str | None = None
) -> Group:
    """Meets the others of a group in a store that they have to themselves. ALONE for one rank. Raises GroupLost after `timeout_s`.

    host: the address of this machine that gloo listens on, by default that of its name.
    """
    if size == 1:
        return ALONE
    until_s = time.monotonic() + timeout_s
    try:
        if backend == "gloo":
            group = make_group(store, rank, size, device_maker(host), lambda: time.monotonic() > until_s)
        else:
            group = _nccl_group(store, rank, size)
    except RuntimeError as error:
        raise lost(rank, size, error) from None
    return DistributedGroup(rank, size, group, timeout_s)


def _nccl_group(store: Store, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # not in every build of torch

    return ProcessGroupNCCL(PrefixStore("nccl", PatientStore(store)), rank, size)


def lost(rank: int, size: int, error: Exception) -> GroupLost:
    cause = str(error).partition("\n")[0]
    return GroupLost(f"rank {rank} of an instance's {size} has lost the others ({cause})")
