"""A host, or another rank of an instance, as a Ray actor: nothing but the calls. Imported where Ray is."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import ray

from infreal.actors.fleet import Birth, Nest, Seat, Setup, Work
from infreal.actors.mail import Page
from perfmodel.messages import Address


def boot_id() -> str:
    """Processes that see the same one share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def pin_to(index: int) -> None:
    """All threads of this process, and those to come, to one core."""
    cores = sorted(os.sched_getaffinity(0))
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), {cores[index % len(cores)]})


@ray.remote(concurrency_groups={"control": 1, "diary": 1}, max_restarts=0)
class Actor:
    """One seat. Control messages are delivered in the order in which each sender sent them."""

    def __init__(self, seat: Seat, setup: Setup, work: Work | None) -> None:
        self._peers: dict[Address, Any] = {}
        self._zero_s = 0.0
        self._begun = threading.Event()
        if work is not None:
            import torch  # coordinators need none

            torch.set_num_threads(1)
            if work.pinned:
                pin_to(seat.address * work.num_ranks + seat.rank)
        self._nest = Nest(seat, setup, work, self._now_s)

    def clock_s(self) -> float:
        return time.monotonic()

    def boot_id(self) -> str:
        return boot_id()

    def pid(self) -> int:
        return os.getpid()

    def begin(self, birth: Birth, zero_s: float, peers: dict[Address, Any]) -> None:
        """zero_s: on this machine's clock, when the run began."""
        self._zero_s, self._peers = zero_s, peers
        self._host = self._nest.make_host(birth, self._post)
        self._host.start()
        self._begun.set()

    @ray.method(concurrency_group="control")
    def meet(self, address: Address, handle: Any) -> None:
        """The host of this address is a new one."""
        self._peers = {**self._peers, address: handle}

    @ray.method(concurrency_group="control")
    def deliver(self, item: Any) -> None:
        self._begun.wait()
        self._host.deliver(item)

    @ray.method(concurrency_group="diary")
    def collect(self, wait_s: float) -> Page:
        return self._host.host.collect(wait_s)

    @ray.method(concurrency_group="diary")
    def outlive(self) -> None:
        """Of a follower: returns when it has ended."""
        self._begun.wait()
        self._host.wait()

    def _now_s(self) -> float:
        return time.monotonic() - self._zero_s

    def _post(self, receiver: Address, item: Any) -> None:
        if receiver in self._peers:
            self._peers[receiver].deliver.remote(item)
