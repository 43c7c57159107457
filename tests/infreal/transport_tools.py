"""Networks of endpoints over each carrier."""

from functools import cache
from itertools import count

from torch.distributed import PrefixStore, TCPStore

from infreal.transport.gloo import GlooTransport
from infreal.transport.in_process import InProcessNetwork

LOCAL = "127.0.0.1"
numbers = count()


@cache
def store_of(rank):
    """A rank's own connection to a store, as it has in another process. They last: to make one takes seconds now and then."""
    if rank == 0:
        return TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
    return TCPStore(LOCAL, store_of(0).port, is_master=False)


class GlooNetwork:
    """All ranks in this process, over loopback; kill: as `InProcessNetwork`'s."""

    def __init__(self, num_ranks):
        name = str(next(numbers))
        stores = [PrefixStore(name, store_of(rank)) for rank in range(num_ranks)]
        self.endpoints = [GlooTransport(rank, num_ranks, store) for rank, store in enumerate(stores)]

    def kill(self, rank):
        self.endpoints[rank].close()


CARRIERS = {"in_process": InProcessNetwork, "gloo": GlooNetwork}
