"""A second process on this machine, for what takes two: rank 1 of a transport, on a core of its own where there are two."""

import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import Store, TCPStore
from torch.multiprocessing import get_context

from infreal.transport.connecting import serve_store
from infreal.transport.gloo import GlooTransport

START_S = 60.0


class Partner:
    """Use as a context. `start(work, …)` calls `work(transport, store, …)` there, `result()` waits for what it returns.

    transport, store: this side's, rank 0. Raises RuntimeError where the work there failed.
    """

    def __enter__(self) -> "Partner":
        self.cores = os.sched_getaffinity(0)
        self.store = serve_store("127.0.0.1", timedelta(seconds=START_S))
        self._connection, theirs = get_context("spawn").Pipe()
        threads = torch.get_num_threads()
        self._process = get_context("spawn").Process(
            target=_serve, args=(self.store.port, theirs, self.cores), daemon=True
        )
        self._process.start()
        theirs.close()
        _use_core(0, self.cores)
        self._threads = threads
        self.transport = GlooTransport(0, 2, self.store)
        return self

    def start(self, work: Callable[..., Any], *args: Any) -> None:
        self._connection.send((work, args))

    def result(self) -> Any:
        try:
            value = self._connection.recv()
        except EOFError:
            raise RuntimeError("the partner process has ended") from None
        if isinstance(value, BaseException):
            raise RuntimeError(f"in the partner process: {value!r}") from value
        return value

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self.transport.close()
        self._process.join(5)
        self._process.kill()
        os.sched_setaffinity(0, self.cores)
        torch.set_num_threads(self._threads)


def _use_core(rank: int, cores: set[int]) -> None:
    """One thread of torch; a core for each rank, as instances of one machine have."""
    torch.set_num_threads(1)
    if len(cores) > 1:
        os.sched_setaffinity(0, {sorted(cores)[rank]})


def _serve(port: int, connection: Connection, cores: set[int]) -> None:
    _use_core(1, cores)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START_S))
    transport = GlooTransport(1, 2, store)
    try:
        while True:
            work, args = connection.recv()
            try:
                connection.send(work(transport, store, *args))
            except Exception as error:
                connection.send(error)
    except (EOFError, OSError):
        pass
    transport.close()


def bare_group(store: Store, rank: int, name: str) -> Any:
    """A gloo group of the two, without a transport."""
    from torch.distributed import PrefixStore, ProcessGroupGloo

    return ProcessGroupGloo(PrefixStore(name, store), rank, 2, timedelta(seconds=START_S))
