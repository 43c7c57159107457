"""The hosts of a run as actors of a Ray cluster, in a placement group: an instance a bundle. Imported where Ray is."""

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from infreal.actors.actor import Actor, boot_id
from infreal.actors.fleet import PAGE_S, Birth, Collected, Died, News, Ready, Setup, Work
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
    """needs: what one instance takes of a node, as Ray counts it."""

    def __init__(self, setup: Setup, work: Work, num_instances: int, needs: dict[str, float]) -> None:
        check_room(num_instances, needs)
        self._setup, self._work = setup, ray.put(work)
        self._needs = needs
        self._group = placement_group([needs] * num_instances, strategy="PACK")
        self._handles: dict[Address, Any] = {}  # of those that live
        self._offsets_s: dict[Address, float] = {}  # of an actor's clock against this one
        self._calls: dict[Any, Call] = {}
        self._zero_s: float | None = None
        if not self._group.wait(PLACE_S):
            self.close()
            raise InputError(f"--ray: no room for {num_instances} instances of {say(needs)} within {PLACE_S:g} s")

    def now_s(self) -> float:
        return 0.0 if self._zero_s is None else time.monotonic() - self._zero_s

    def make(self, address: Address) -> None:
        options: dict[str, Any] = {"num_cpus": 0}
        if address >= 0:
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=address)
            cpus, gpus = self._needs.get("CPU", 0), self._needs.get("GPU", 0)
            options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": place}
        handle = Actor.options(**options).remote(address, self._setup, self._work if address >= 0 else None)
        self._handles[address] = handle
        self._ask(address, handle.boot_id.remote())

    def begin(self, births: list[Birth]) -> None:
        if self._zero_s is None:
            self._zero_s = time.monotonic()
        new = {birth.address for birth in births}
        for address, handle in self._handles.items():
            if address not in new:
                for other in new:
                    handle.meet.remote(other, self._handles[other])
        begun = []
        for birth in births:
            zero_s = self._zero_s + self._offsets_s[birth.address]
            begun.append(self._handles[birth.address].begin.remote(birth, zero_s, dict(self._handles)))
        for birth, call in zip(births, begun, strict=True):
            with suppress(RayActorError):  # its diary will say so
                ray.get(call)
            self._collect(birth.address)

    def post(self, receiver: Address, item: Any) -> None:
        if receiver in self._handles:
            self._handles[receiver].deliver.remote(item)

    def news(self, timeout_s: float) -> list[tuple[Address, News]]:
        refs = list(self._calls)
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        found = [(self._calls[ref].address, self._read(ref)) for ref in ready]
        return [(address, news) for address, news in found if news is not None]

    def _read(self, ref: Any) -> News | None:
        """None: of a host that was ended."""
        call = self._calls.pop(ref)
        if self._handles.get(call.address) is not call.handle:
            return None
        try:
            value = ray.get(ref)
        except RayError as error:
            del self._handles[call.address]
            return Died(next(iter(str(error).strip().splitlines()), type(error).__name__))
        if not isinstance(value, Page):
            self._offsets_s[call.address] = clock_offset_s(call.handle)
            return Ready()
        self._collect(call.address)
        return Collected(value, call.asked_s)

    def _collect(self, address: Address) -> None:
        if address in self._handles:
            self._ask(address, self._handles[address].collect.remote(PAGE_S))

    def _ask(self, address: Address, ref: Any) -> None:
        self._calls[ref] = Call(address, self._handles[address], self.now_s())

    def pid_of(self, address: Address) -> int:
        """Process of a host, on its node."""
        return int(ray.get(self._handles[address].pid.remote()))

    def kill(self, address: Address) -> None:
        handle = self._handles.pop(address, None)
        if handle is not None:
            ray.kill(handle)

    def close(self) -> None:
        for address in list(self._handles):
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
