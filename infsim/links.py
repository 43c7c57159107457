"""Links between instances, as fluids: who gets which share of the bandwidth, and when each transfer is through.

A transfer leaves through a port of its source and arrives through a port of its destination. Instances of one node use their
intra-node ports, others their inter-node ports; where a link is `per_node` (one network card), the instances of a node share
its port. A port gives its transfers equal shares, and what a paced transfer does not want goes to the others; a transfer gets
the smaller share of its two ends. That is processor sharing at each end: no port is ever over-committed, but a share lost at
the other end is not handed out again (as max-min fairness would do), so that a change touches only transfers that share an end.

Bandwidth only: latency and copies belong to the caller. Knows no clock: every method is told the time, which never goes back,
and `complete` is called no later than the first change after a transfer is through.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from perfmodel.specs import LinkSpec

TransferId = tuple[int, ...]  # of equal times, the smaller goes first


class PortName(NamedTuple):
    """`owner`: the instance, or the node where its instances share the port."""

    link: str  # "intra" or "inter"
    direction: str  # "egress" or "ingress"
    owner: int


@dataclass(slots=True, eq=False)
class _Transfer:
    transfer_id: TransferId
    src: int
    dst: int
    ports: tuple["_Port", "_Port"]
    cap_bytes_per_s: float
    left_bytes: float
    settled_s: float
    rate_bytes_per_s: float = 0.0
    end_s: float = inf

    def settle(self, now_s: float) -> None:
        """Count what has flowed since the rate was set."""
        through = now_s >= self.end_s
        num_bytes = self.left_bytes if through else self.rate_bytes_per_s * (now_s - self.settled_s)
        self.left_bytes -= num_bytes
        self.settled_s = now_s
        for port in self.ports:
            port.moved_bytes += num_bytes


@dataclass(slots=True, eq=False)
class _Port:
    capacity_bytes_per_s: float
    transfers: dict[TransferId, _Transfer] = field(default_factory=dict)
    share_bytes_per_s: float = inf
    moved_bytes: float = 0.0

    def caps(self) -> list[float]:
        return [transfer.cap_bytes_per_s for transfer in self.transfers.values()]


class Links:
    """Transfers in progress. `nodes`: node index of each instance; an instance's `num_gpus` GPUs send at once where each has a
    link of its own."""

    def __init__(self, nodes: Sequence[int], num_gpus: int, intra: LinkSpec, inter: LinkSpec) -> None:
        self._nodes = nodes
        self._num_gpus = num_gpus
        self._specs = {"intra": intra, "inter": inter}
        self._ports: dict[PortName, _Port] = {}
        self._transfers: dict[TransferId, _Transfer] = {}
        self._ends: list[tuple[float, TransferId]] = []  # heap; stale where a transfer is gone or ends at another time

    # ---- topology ------------------------------------------------------------------------------------------------------------
    def spec(self, src: int, dst: int) -> LinkSpec:
        """The link between two instances."""
        return self._specs[self._kind(src, dst)]

    def _kind(self, src: int, dst: int) -> str:
        return "intra" if self._nodes[src] == self._nodes[dst] else "inter"

    def _port(self, kind: str, direction: str, instance: int) -> _Port:
        spec = self._specs[kind]
        name = PortName(kind, direction, self._nodes[instance] if spec.per_node else instance)
        if name not in self._ports:
            self._ports[name] = _Port(spec.group_bytes_per_s(self._num_gpus))
        return self._ports[name]

    def _ends_of(self, src: int, dst: int) -> tuple[_Port, _Port]:
        kind = self._kind(src, dst)
        return self._port(kind, "egress", src), self._port(kind, "ingress", dst)

    # ---- transfers -----------------------------------------------------------------------------------------------------------
    def start(
        self, transfer_id: TransferId, src: int, dst: int, num_bytes: float, now_s: float, rate_cap: float = inf
    ) -> None:
        """`num_bytes` begin to flow, at most `rate_cap` bytes/s (pacing)."""
        assert transfer_id not in self._transfers, f"transfer {transfer_id} is in progress"
        assert src != dst and num_bytes >= 0 and rate_cap > 0, (transfer_id, src, dst, num_bytes, rate_cap)
        self._check_time(now_s)
        transfer = _Transfer(transfer_id, src, dst, self._ends_of(src, dst), rate_cap, float(num_bytes), now_s)
        self._transfers[transfer_id] = transfer
        for port in transfer.ports:
            port.transfers[transfer_id] = transfer
        self._share(transfer.ports, now_s)

    def cancel(self, transfer_id: TransferId, now_s: float) -> float:
        """End a transfer early; returns the bytes that have not flowed. KeyError where it is not in progress."""
        self._check_time(now_s)
        transfer = self._transfers[transfer_id]
        self._remove([transfer], now_s)
        return transfer.left_bytes

    def next_completion(self) -> tuple[float, TransferId] | None:
        """When the next transfer is through, as the rates are now."""
        while self._ends and not self._is_current(*self._ends[0]):
            heappop(self._ends)
        return self._ends[0] if self._ends else None

    def complete(self, now_s: float) -> list[TransferId]:
        """Transfers through by `now_s`, in order of (time, id). Exact even where the caller is late: each one's share goes to
        the others from the moment it ended."""
        done: list[TransferId] = []
        while (head := self.next_completion()) is not None and head[0] <= now_s:
            together = []
            while (other := self.next_completion()) is not None and other[0] == head[0]:
                heappop(self._ends)
                together.append(self._transfers.pop(other[1]))
            done += [transfer.transfer_id for transfer in together]
            self._remove(together, head[0])
        return done

    # ---- what is going on ----------------------------------------------------------------------------------------------------
    def active(self, instance: int) -> tuple[float, float]:
        """(egress, ingress) bytes/s that flow out of and into an instance now."""
        flows = [0.0, 0.0]
        for kind in self._specs:
            for transfer in self._port(kind, "egress", instance).transfers.values():
                flows[0] += transfer.rate_bytes_per_s * (transfer.src == instance)
            for transfer in self._port(kind, "ingress", instance).transfers.values():
                flows[1] += transfer.rate_bytes_per_s * (transfer.dst == instance)
        return flows[0], flows[1]

    def share_bytes_per_s(self, src: int, dst: int) -> float:
        """What one more transfer from `src` to `dst` would get now (queries of MicroAttention are priced with it)."""
        return min(fair_share(port.capacity_bytes_per_s, [*port.caps(), inf]) for port in self._ends_of(src, dst))

    def moved_bytes(self, now_s: float) -> dict[PortName, float]:
        """Bytes that have passed each port used so far."""
        self._check_time(now_s)
        for transfer in self._transfers.values():
            transfer.settle(now_s)
        return {name: port.moved_bytes for name, port in self._ports.items()}

    def check_invariants(self) -> None:
        """No port is over-committed; every transfer has a positive rate and is in both of its ports."""
        for name, port in self._ports.items():
            total = sum((transfer.rate_bytes_per_s for transfer in port.transfers.values()), 0.0)
            assert total <= port.capacity_bytes_per_s * (1 + 1e-9), (name, total, port.capacity_bytes_per_s)
        for transfer_id, transfer in self._transfers.items():
            assert transfer.rate_bytes_per_s > 0, f"transfer {transfer_id} stands still"
            assert all(port.transfers[transfer_id] is transfer for port in transfer.ports)
        assert sum(len(port.transfers) for port in self._ports.values()) == 2 * len(self._transfers)

    def _check_time(self, now_s: float) -> None:
        """What is through must be completed first, so that its share goes to the others from that moment on."""
        head = self.next_completion()
        assert head is None or head[0] >= now_s, f"transfer {head} was through before {now_s}"

    # ---- shares --------------------------------------------------------------------------------------------------------------
    def _remove(self, transfers: Sequence[_Transfer], now_s: float) -> None:
        for transfer in transfers:
            transfer.settle(now_s)
            self._transfers.pop(transfer.transfer_id, None)
            for port in transfer.ports:
                del port.transfers[transfer.transfer_id]
        self._share((port for transfer in transfers for port in transfer.ports), now_s)

    def _share(self, ports: Iterable[_Port], now_s: float) -> None:
        """The transfers of these ports have changed: divide each one anew."""
        touched: dict[TransferId, _Transfer] = {}
        for port in ports:
            port.share_bytes_per_s = fair_share(port.capacity_bytes_per_s, port.caps())
            touched |= port.transfers
        for transfer in touched.values():
            self._set_rate(transfer, now_s)

    def _set_rate(self, transfer: _Transfer, now_s: float) -> None:
        egress, ingress = transfer.ports
        rate = min(transfer.cap_bytes_per_s, egress.share_bytes_per_s, ingress.share_bytes_per_s)
        if rate == transfer.rate_bytes_per_s:
            return  # its end stays what it was, to the bit
        transfer.settle(now_s)
        transfer.rate_bytes_per_s = rate
        transfer.end_s = now_s + transfer.left_bytes / rate
        heappush(self._ends, (transfer.end_s, transfer.transfer_id))

    def _is_current(self, end_s: float, transfer_id: TransferId) -> bool:
        transfer = self._transfers.get(transfer_id)
        return transfer is not None and transfer.end_s == end_s


def fair_share(capacity_bytes_per_s: float, caps_bytes_per_s: Iterable[float]) -> float:
    """The share φ with Σ min(cap, φ) = capacity; infinite where the caps leave capacity over."""
    left = capacity_bytes_per_s
    caps = sorted(caps_bytes_per_s)
    for taken, cap in enumerate(caps):
        share = left / (len(caps) - taken)
        if cap >= share:
            return share
        left -= cap
    return inf
