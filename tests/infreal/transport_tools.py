"""Networks of endpoints over each carrier."""

import torch

from infreal.transport.gloo import GlooTransport
from infreal.transport.in_process import InProcessNetwork


class GlooNetwork:
    """All ranks in this process, over loopback; kill: as `InProcessNetwork`'s."""

    def __init__(self, num_ranks):
        store = torch.distributed.HashStore()
        self.endpoints = [GlooTransport(rank, num_ranks, store) for rank in range(num_ranks)]

    def kill(self, rank):
        self.endpoints[rank].close()


CARRIERS = {"in_process": InProcessNetwork, "gloo": GlooNetwork}
