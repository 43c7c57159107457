"""Prices of borrowing (design.md §3), for belief and truth alike: what a debtor waits for, and what serving it costs.

A debtor's layer waits for remote MicroAttention only as far as exchange + MA + residual exceeds the local attention of that
layer: Q exists only after QKV, and O needs the merge, so nothing else overlaps inside a layer.
"""

from perfmodel.cost import CostModel
from perfmodel.specs import LinkSpec

KERNELS_PER_LAYER = (
    4  # attention, O, gate/up, down: a query finds one of them running on the creditor and waits for its end
)


def exchange_s(cost: CostModel, link: LinkSpec, rows: int) -> float:
    """Round trip of one layer's queries of `rows` rows and their partial states, with the engine's overhead for one peer."""
    num_bytes = cost.query_bytes(rows) + cost.partial_bytes(rows)
    wire_s = 2 * link.latency_s + num_bytes / link.group_bytes_per_s(cost.instance.num_gpus)
    return wire_s * cost.scale["transfer"] + cost.instance.engine.exchange_s_per_layer_per_peer * cost.scale["host"]


def residual_s(cost: CostModel, iteration_s: float) -> float:
    """Mean time until what the creditor is running has ended, from its iteration time: half a kernel."""
    return iteration_s / (2 * KERNELS_PER_LAYER * cost.instance.model.num_layers)


def remote_layer_s(cost: CostModel, link: LinkSpec, rows: int, tokens: float, creditor_iteration_s: float) -> float:
    """From sending one layer's queries until the partial states are back."""
    layers = cost.instance.model.num_layers
    micro_attention_s = cost.micro_attention_s(rows, tokens) / layers
    return exchange_s(cost, link, rows) + micro_attention_s + residual_s(cost, creditor_iteration_s)
