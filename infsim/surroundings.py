"""What instances publish to each other: how much MicroAttention and copying they cost, and how long their iterations are.

Published when a batch changes or a transfer starts or ends, and only where a value has moved by more than `HYSTERESIS`; a step
is priced with what was published last. Macro steps and single iterations thus see the same values.
"""

from collections.abc import Callable

from infsim.executor import Executor
from infsim.links import Links
from perfmodel.messages import StartIterations
from perfmodel.pricing import Surroundings, served_s

HYSTERESIS = 0.05


class Published:
    """The last published values of all instances. `changed(instance)` is called for each one whose prices have changed."""

    def __init__(self, executors: list[Executor], links: Links, changed: Callable[[int], None]) -> None:
        self._executors = executors
        self._links = links
        self._changed = changed
        count = len(executors)
        self._served: list[dict[int, float]] = [{} for _ in range(count)]  # creditor → debtor → share of its time
        self._copies = [0.0] * count  # share of time
        self._iteration_s = [0.0] * count
        self._debtors: list[set[int]] = [set() for _ in range(count)]  # who reads from an instance now
        self._creditors: list[set[int]] = [set() for _ in range(count)]

    def around(self, instance: int) -> Surroundings:
        """What a step of `instance` that starts now depends on."""
        served = self._served[instance]
        share = sum(served.values(), 0.0) + self._copies[instance] if served else self._copies[instance]
        return Surroundings(share, lambda peer: self._links.spec(instance, peer), self.iteration_s)

    def iteration_s(self, instance: int) -> float:
        """Duration of an iteration of that instance; 0 where it is idle."""
        return self._iteration_s[instance]

    def publish(self, instance: int, step: StartIterations | None) -> None:
        """The batch of an instance has changed (None: it is idle)."""
        executor = self._executors[instance]
        period_s = executor.iteration_s
        if _moved(self._iteration_s[instance], period_s):
            self._iteration_s[instance] = period_s
            for debtor in sorted(self._debtors[instance]):
                self._changed(debtor)
        creditors = {r.peer for r in step.remote + step.chunk_remote} if step else set()
        if not creditors and not self._creditors[instance]:
            return
        for creditor in sorted(creditors | self._creditors[instance]):
            share = served_s(executor.cost, step, creditor) / period_s if step and creditor in creditors else 0.0
            self._set_served(creditor, instance, share)
        self._creditors[instance] = creditors

    def _set_served(self, creditor: int, debtor: int, share: float) -> None:
        served = self._served[creditor]
        if share:
            self._debtors[creditor].add(debtor)
        else:
            self._debtors[creditor].discard(debtor)
        if _moved(served.get(debtor, 0.0), share):
            if share:
                served[debtor] = share
            else:
                served.pop(debtor, None)
            self._changed(creditor)

    def replace(self, instance: int, executor: Executor) -> Executor:
        """The instance is lost; the one that comes back has published nothing."""
        self._executors[instance] = executor
        self.publish(instance, None)
        self._copies[instance] = 0.0
        return executor

    def publish_copies(self, instance: int) -> None:
        """Transfers of an instance have started or ended: the share of its time that copying takes."""
        out_bytes_per_s, in_bytes_per_s = self._links.active(instance)
        flow = out_bytes_per_s + in_bytes_per_s
        share = self._executors[instance].cost.copy_s(flow) if flow else 0.0
        if _moved(self._copies[instance], share):
            self._copies[instance] = share
            self._changed(instance)


def _moved(before: float, after: float) -> bool:
    return abs(after - before) > HYSTERESIS * max(before, after) if after else before != 0.0
