"""One run on a Ray cluster: lay the data plane, place the actors, and let the head carry it out. Imported where Ray is."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import ray
from torch.distributed import TCPStore

from experiments.raycluster import LOCAL
from infreal.actors.fleet import Setup, Work
from infreal.actors.head import Head
from infreal.actors.instance import Instance
from infreal.actors.ray_fleet import RayFleet
from infreal.model import Decoder
from infreal.requests import Requests
from infreal.transport import Transport
from infreal.transport.gloo import GlooTransport
from perfmodel.cluster import ClusterSpec
from perfmodel.journal import Observer
from perfmodel.records import RunResult

JOIN_S = 60.0


@dataclass(frozen=True, slots=True)
class RayOptions:
    """ray: the cluster's address, or LOCAL · device, backend: of every instance · the rest: see `Setup` and `Work`."""

    ray: str = LOCAL
    device: str = "cpu"
    backend: str = "torch"
    deadline_s: float = 10.0
    check: bool = False
    pinned: bool = False
    prepare: Callable[[Instance], None] | None = None

    @property
    def needs(self) -> dict[str, float]:
        """What one instance takes of a node."""
        return {"CPU": 1} if self.device == "cpu" else {"CPU": 1, "GPU": 1}


def make_head(
    make_spec: Callable[[], ClusterSpec],
    make_decoder: Callable[[], Decoder],
    requests: Requests,
    observer: Observer | None = None,
    options: RayOptions | None = None,
) -> Head:
    """A run on the cluster that Ray is connected to. Raises InputError where there is no room for it."""
    options, spec = options or RayOptions(), make_spec()
    is_local = options.ray == LOCAL
    host = "127.0.0.1" if is_local else ray.util.get_node_ip_address()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    join = partial(join_data_plane, host, store.port, spec.num_instances, "lo" if is_local else None)
    setup = Setup(make_spec, options.deadline_s, full=observer is not None, check=options.check)
    work = Work(make_decoder, requests, join, options.backend, options.pinned, options.prepare)
    fleet = RayFleet(setup, work, spec.num_instances, options.needs)
    fleet.store = store  # it lives as long as the fleet
    return Head(spec, requests, fleet, observer, options.deadline_s)


def join_data_plane(host: str, port: int, num_ranks: int, interface: str | None, rank: int) -> Transport:
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_S))
    return GlooTransport(rank, num_ranks, store, interface)


__all__ = ["RayOptions", "RunResult", "make_head"]
