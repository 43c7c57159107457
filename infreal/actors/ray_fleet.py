"""The hosts of a run as actors of a Ray cluster, in a placement group: an instance a bundle, so that its ranks share a node.

Imported where Ray is.
"""

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from infreal.actors.actor import Actor, boot_id
from infreal.actors.fleet import PAGE_S, Birth, Collected, Died, News, Ready, Seat, Setup, Work
from infreal.actors.mail import Page
from perfmodel.errors import InputError
from perfmodel.messages import Address

PLACE_S = 60.0  # to find room on the cluster
CLOCK_CALLS = 9


@dataclass(frozen=True, slots=True)
class Call:
    """A call that has not returned. asked_s: time of the run."""

    address: Address
    handle: Any
    asked_s: float


class RayFleet:
    """needs: what one rank of an instance takes of a node, as Ray counts it."""

    def __init__(self, setup: Setup, work: Work, num_instances: int, needs: dict[str, float]) -> None:
        self._setup, self._work, self._num_ranks = setup, ray.put(work), work.num_ranks
        self._needs = needs
        instance_needs = {name: work.num_ranks * amount for name, amount in needs.items()}
        check_room(num_instances, instance_needs)
        self._group = placement_group([instance_needs] * num_instances, strategy="PACK")
        self._ranks: dict[Address, list[Any]] = {}  # handles of those that live; a coordinator is one rank
        self._lives: Counter[Address] = Counter()
        self._offsets_s: dict[Any, float] = {}  # of an actor's clock against this one
        self._calls: dict[Any, Call] = {}
        self._zero_s: float | None = None
        if not self._group.wait(PLACE_S):
            self.close()
            raise InputError(
                f"--ray: no room for {num_instances} instances of {say(instance_needs)} within {PLACE_S:g} s"
            )

    def now_s(self) -> float:
        return 0.0 if self._zero_s is None else time.monotonic() - self._zero_s

    def make(self, address: Address) -> None:
        options: dict[str, Any] = {"num_cpus": 0}
        if address >= 0:
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=address)
            cpus, gpus = self._needs.get("CPU", 0), self._needs.get("GPU", 0)
            options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": place}
        self._lives[address] += 1
        work, num_ranks = (self._work, self._num_ranks) if address >= 0 else (None, 1)
        seats = [Seat(address, rank, self._lives[address]) for rank in range(num_ranks)]
        self._ranks[address] = [Actor.options(**options).remote(seat, self._setup, work) for seat in seats]
        for handle in self._ranks[address]:
            self._ask(address, handle, handle.boot_id.remote())

    def begin(self, births: list[Birth]) -> None:
        if self._zero_s is None:
            self._zero_s = time.monotonic()
        new = {birth.address for birth in births}
        hosts = {address: ranks[0] for address, ranks in self._ranks.items()}
        for address, handle in hosts.items():
            if address not in new:
                for other in new:
                    handle.meet.remote(other, hosts[other])
        begun = []
        for birth in births:
            for handle in self._ranks[birth.address]:
                begun.append(handle.begin.remote(birth, self._zero_s + self._offsets_s[handle], hosts))
        for call in begun:
            with suppress(RayActorError):  # its diary will say so
                ray.get(call)
        for birth in births:
            self._collect(birth.address)
            for handle in self._ranks.get(birth.address, [])[1:]:
                self._ask(birth.address, handle, handle.outlive.remote())

    def post(self, receiver: Address, item: Any) -> None:
        if receiver in self._ranks:
            self._ranks[receiver][0].deliver.remote(item)

    def news(self, timeout_s: float) -> list[tuple[Address, News]]:
        refs = list(self._calls)
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        found = [(self._calls[ref].address, self._read(ref)) for ref in ready]
        return [(address, news) for address, news in found if news is not None]

    def _read(self, ref: Any) -> News | None:
        """None: of a host that was ended, or is not complete yet."""
        call = self._calls.pop(ref)
        address, handle = call.address, call.handle
        if handle not in self._ranks.get(address, ()):
            return None
        try:
            value = ray.get(ref)
        except RayError as error:
            return self._lose(address, next(iter(str(error).strip().splitlines()), type(error).__name__))
        if value is None:
            return self._lose(address, f"rank {self._ranks[address].index(handle)} has lost rank 0")
        if isinstance(value, Page):
            self._collect(address)
            return Collected(value, call.asked_s)
        self._offsets_s[handle] = clock_offset_s(handle)
        return Ready() if all(rank in self._offsets_s for rank in self._ranks[address]) else None

    def _lose(self, address: Address, why: str) -> Died:
        """One rank less is one host less."""
        self.kill(address)
        return Died(why)

    def _collect(self, address: Address) -> None:
        if address in self._ranks:
            handle = self._ranks[address][0]
            self._ask(address, handle, handle.collect.remote(PAGE_S))

    def _ask(self, address: Address, handle: Any, ref: Any) -> None:
        self._calls[ref] = Call(address, handle, self.now_s())

    def pid_of(self, address: Address, rank: int = 0) -> int:
        """Process of a host, on its node."""
        return int(ray.get(self._ranks[address][rank].pid.remote()))

    def kill(self, address: Address) -> None:
        for handle in self._ranks.pop(address, ()):
            self._offsets_s.pop(handle, None)
            ray.kill(handle)

    def close(self) -> None:
        for address in list(self._ranks):
            self.kill(address)
        remove_placement_group(self._group)


def clock_offset_s(handle: Any) -> float:
    """How far an actor's clock is ahead of this one: not at all on this machine; else as the quickest of some calls says."""
    if ray.get(handle.boot_id.remote()) == boot_id():
        return 0.0
    found = []
    for _ in range(CLOCK_CALLS):
        before_s = time.monotonic()
        there_s = ray.get(handle.clock_s.remote())
        after_s = time.monotonic()
        found.append((after_s - before_s, there_s - (before_s + after_s) / 2))
    return float(min(found)[1])


def check_room(num_instances: int, needs: dict[str, float]) -> None:
    """Raises InputError where the cluster could never hold the instances."""
    total = ray.cluster_resources()
    for name, amount in needs.items():
        if total.get(name, 0) < num_instances * amount:
            raise InputError(
                f"--ray: {num_instances} instances need {num_instances * amount:g} {name}s, the cluster has "
                f"{total.get(name, 0):g} (fewer instances: cluster.gpus_per_node)"
            )


def say(needs: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
