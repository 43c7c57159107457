"""One run on a Ray cluster: lay the data plane, place the actors, and let the head carry it out. Imported where Ray is."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import ray
from torch.distributed import PrefixStore, Store, TCPStore

from experiments.raycluster import LOCAL
from infreal.actors.fleet import Seat, Setup, Work
from infreal.actors.head import Head
from infreal.actors.instance import Instance
from infreal.actors.ray_fleet import RayFleet
from infreal.model import Decoder
from infreal.requests import Requests
from infreal.transport import Transport
from infreal.transport.connecting import serve_store
from infreal.transport.gloo import GlooTransport
from infreal.transport.group import Group, join_group
from infreal.transport.nccl import NcclTransport, nccl_groups
from perfmodel.cluster import ClusterSpec
from perfmodel.journal import Observer
from perfmodel.records import RunResult

JOIN_S = 60.0


@dataclass(frozen=True, slots=True)
class RayOptions:
    """ray: the cluster's address, or LOCAL · device, backend: of every instance · carrier: of tensors of GPUs, gloo or nccl · the
    rest: see `Setup` and `Work`."""

    ray: str = LOCAL
    device: str = "cpu"
    backend: str = "torch"
    carrier: str = "gloo"
    deadline_s: float = 10.0
    check: bool = False
    pinned: bool = False
    prepare: Callable[[Instance], None] | None = None

    @property
    def needs(self) -> dict[str, float]:
        """What one rank of an instance takes of a node."""
        return {"CPU": 1} if self.device == "cpu" else {"CPU": 1, "GPU": 1}


@dataclass(frozen=True, slots=True)
class GlooNet:
    """Where the ranks of a run meet. secret: in front of all keys of the store, so that nobody meets them by accident · is_local:
    all on one machine."""

    host: str
    port: int
    secret: str
    is_local: bool
    carrier: str
    num_instances: int
    num_ranks: int

    def pairs(self, seat: Seat) -> Transport:
        store = self._store(f"pairs/{seat.rank}")
        gloo = GlooTransport(seat.address, self.num_instances, store, self._own_host())
        return NcclTransport(gloo, nccl_groups(store)) if self.carrier == "nccl" else gloo

    def control(self, seat: Seat) -> Transport:
        store = self._store(f"control/{seat.address}/{seat.life}")
        return GlooTransport(seat.rank, self.num_ranks, store, self._own_host())

    def group(self, seat: Seat, timeout_s: float) -> Group:
        store = self._store(f"group/{seat.address}/{seat.life}")
        return join_group(store, seat.rank, self.num_ranks, timeout_s, backend=self.carrier, host=self._own_host())

    def _store(self, name: str) -> Store:
        store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=JOIN_S))
        return PrefixStore(f"{self.secret}/{name}", store)

    def _own_host(self) -> str:
        return self.host if self.is_local else ray.util.get_node_ip_address()


def make_head(
    make_spec: Callable[[], ClusterSpec],
    make_decoder: Callable[[Group], Decoder],
    requests: Requests,
    observer: Observer | None = None,
    options: RayOptions | None = None,
) -> Head:
    """A run on the cluster that Ray is connected to. Raises InputError where there is no room for it."""
    options, spec = options or RayOptions(), make_spec()
    is_local = options.ray == LOCAL
    host = "127.0.0.1" if is_local else ray.util.get_node_ip_address()
    store = serve_store(host, timedelta(seconds=JOIN_S))
    num_ranks = spec.instance.tensor_parallel
    net = GlooNet(host, store.port, secrets.token_hex(16), is_local, options.carrier, spec.num_instances, num_ranks)
    setup = Setup(make_spec, options.deadline_s, full=observer is not None, check=options.check)
    work = Work(make_decoder, requests, net, num_ranks, options.backend, options.pinned, options.prepare)
    fleet = RayFleet(setup, work, spec.num_instances, options.needs)
    fleet.store = store  # it lives as long as the fleet
    return Head(spec, requests, fleet, observer, options.deadline_s)


__all__ = ["RayOptions", "RunResult", "make_head"]
