"""Prices of commands: how long a step takes under a cost model (design.md §3)."""

from perfmodel.cost import CostModel
from perfmodel.messages import StartIterations
from perfmodel.steptime import StepTime


def price_step(cost: CostModel, step: StartIterations) -> StepTime:
    """Iteration j = max(launches, kernels + prefill attention + decode attention(j)) + host; decode attention grows with j."""
    rows, chunks = step.decode_rows, step.chunks
    tokens = rows + sum(chunk.tokens for chunk in chunks)
    logits_rows = rows + sum(chunk.last for chunk in chunks)
    kernel_s, launch_s, host_s = cost.iteration_terms(tokens, rows, logits_rows)
    for chunk in chunks:
        kernel_s += cost.prefill_attention_s(chunk.tokens, chunk.prefix_tokens)
    if not rows:
        return StepTime(host_s, ((max(kernel_s, launch_s), 0.0),))
    floor_s, base_s, s_per_token = cost.decode_attention_terms(rows)
    affine = (kernel_s + base_s + s_per_token * step.decode_context_tokens, s_per_token * rows)
    return StepTime(host_s, ((max(kernel_s + floor_s, launch_s), 0.0), affine))
