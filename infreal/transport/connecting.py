"""The store in which ranks meet, and a gloo group of some of them, made once all have said there that they have come."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

TIMEOUT = timedelta(seconds=3)
ATTEMPTS = 20
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.02
GREETING_SLOT = (1 << 31) - 2


def serve_store(host: str, timeout: timedelta = TIMEOUT) -> TCPStore:
    """A store that others reach at `host` and its port. It listens there alone; a TCPStore by itself does so everywhere."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


class PatientStore(Store):
    """A view of a store that waits by looking again and again. A wait of a TCPStore itself holds its connection, so that whoever
    else of the process wants something of the store waits too, perhaps for each other."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        end_s = time.monotonic() + timeout.total_seconds()
        while not self._store.check(keys):
            if time.monotonic() > end_s:
                raise RuntimeError(f"{keys} did not come into the store")
            time.sleep(SHORTEST_PAUSE_S)


def device_maker(host: str | None) -> Callable[[], Any]:
    """Makes gloo's devices, each with an event loop of its own. Raises RuntimeError where this machine has no such address."""
    if host is None:
        return ProcessGroupGloo.create_default_device
    ProcessGroupGloo.create_device(hostname=host)
    return lambda: ProcessGroupGloo.create_device(hostname=host)


def make_group(
    store: Store, rank: int, size: int, make_device: Callable[[], Any], is_over: Callable[[], bool]
) -> ProcessGroupGloo:
    """Waits for the others for as long as it takes. Raises RuntimeError when `is_over`, or where they cannot be reached.

    gloo now and then fails to connect where several groups do so at once: all sides try again.
    """
    for attempt in range(ATTEMPTS):
        own = PrefixStore(str(attempt), store)
        _meet(own, rank, size, is_over)
        try:
            return _connect(own, rank, size, make_device())
        except RuntimeError as error:
            cause = error
    raise cause


def _meet(store: Store, rank: int, size: int, is_over: Callable[[], bool]) -> None:
    store.set(f"here/{rank}", "")
    pause_s = SHORTEST_PAUSE_S
    while not store.check([f"here/{other}" for other in range(size)]):
        if is_over():
            raise RuntimeError("nobody waits for the others any longer")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _connect(store: Store, rank: int, size: int, device: Any) -> ProcessGroupGloo:
    """A greeting each way says that the others are connected, too."""
    options = ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = [device], 1, TIMEOUT
    patient = PatientStore(store)  # gloo keeps no hold of it
    group = ProcessGroupGloo(PrefixStore("gloo", patient), rank, size, options)
    others = [other for other in range(size) if other != rank]
    greetings = [group.recv([torch.empty(1)], other, GREETING_SLOT) for other in others]
    greetings += [group.send([torch.zeros(1)], other, GREETING_SLOT) for other in others]
    for greeting in greetings:
        greeting.wait(TIMEOUT)
    return group
