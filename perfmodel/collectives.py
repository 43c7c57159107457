"""Communication inside an instance: all-reduce of tensor-parallel ranks, hand-over between pipeline stages."""

from perfmodel.basis import Basis
from perfmodel.laws.allreduce import AllReduceLaw
from perfmodel.specs import InstanceSpec


def all_reduce_s(law: AllReduceLaw, instance: InstanceSpec, num_bytes: float) -> float:
    """All-reduce over the tensor-parallel ranks.

    Ranks beyond one node: reduce-scatter and all-gather inside the node (together one all-reduce there) around an
    all-reduce of each GPU's share between the nodes (analytic: a ring over the nodes on `inter_link`).
    """
    ranks, per_node = instance.tensor_parallel, instance.gpus_per_node
    if ranks == 1:
        return 0.0
    inter, inside = instance.inter_link, min(ranks, per_node)
    time_s = law.time_s(num_bytes, inside, instance.intra_link) if inside > 1 else 0.0
    if ranks <= per_node:
        return time_s
    nodes = -(-ranks // per_node)
    between = 2 * (nodes - 1) * inter.latency_s + 2 * (nodes - 1) / nodes * num_bytes / inter.group_bytes_per_s(inside)
    return time_s + between


def all_reduce_basis(law: AllReduceLaw, instance: InstanceSpec, num_bytes: float) -> Basis:
    """Analytic beyond one node and between pipeline stages; nothing to know without either."""
    ranks = instance.tensor_parallel
    if ranks > instance.gpus_per_node or instance.pipeline_parallel > 1:
        return Basis.ANALYTIC
    return law.basis(num_bytes, ranks, instance.intra_link) if ranks > 1 else Basis.MEASURED


def hop_s(instance: InstanceSpec, num_bytes: float) -> float:
    """Hand-over of `num_bytes` from stage to stage, cut over the tensor-parallel ranks; the slowest link counts."""
    if instance.pipeline_parallel == 1:
        return 0.0
    link = instance.intra_link if instance.num_gpus <= instance.gpus_per_node else instance.inter_link
    ranks = min(instance.tensor_parallel, instance.gpus_per_node)
    return link.latency_s + num_bytes / link.group_bytes_per_s(ranks)
