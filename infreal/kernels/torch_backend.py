"""The torch twins: any device and dtype. On a CPU they serve: in fp32 decode rows go through a compiled loop (`numba_decode`) where
numba is installed, and prompts through torch's fused attention.

Elsewhere a decode row's KV is worked off in segments, whose K and V are copied into one matrix. What the kernels' contract says of
shapes is not repeated here.
"""

from importlib.util import find_spec

import torch

from infreal.kernels.partial import Partial
from infreal.kernels.sizes import ceil_div

SEGMENT_TOKENS = 2048  # the scores of a segment (256 KB for 32 heads) stay in the L2 cache; measured: 256 to 2,048
MIN_PART_BYTES = 1 << 20  # of K, and of V: what is worth a thread's while
PREFILL_SEGMENT_TOKENS = 8192  # of K and V copied at a time: 64 MB for 8 KV heads of 128
HAS_NUMBA = find_spec("numba") is not None

KEYS, VALUES = 0, 1  # the third axis of the pool


@torch.inference_mode()
def micro_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    num_local_tokens: torch.Tensor,
    scale: float,
    out: Partial,
) -> None:
    """kv: one layer of the pool, `[blocks, 2, block_tokens, kv_heads, head_dim]`."""
    kv_heads = kv.shape[3]
    queries = (q.float() * scale).unflatten(1, (kv_heads, -1))
    states = Partial(*(t.unflatten(1, (kv_heads, -1)) for t in (out.acc, out.m, out.e)))
    lengths = num_local_tokens.tolist()
    if not lengths:
        return
    if HAS_NUMBA and kv.is_cpu and kv.dtype == torch.float32:
        _attend_compiled(queries, kv, block_table, lengths, states)
        return
    out.fill_neutral()
    for row, num_tokens in enumerate(lengths):
        _attend_row(queries[row], kv, block_table[row], num_tokens, states[row])


def _attend_compiled(
    queries: torch.Tensor, kv: torch.Tensor, block_table: torch.Tensor, lengths: list[int], states: Partial
) -> None:
    """Into how many parts a row is cut depends on the row and the number of threads alone, and so does its result."""
    from infreal.kernels.numba_decode import attend_parts  # numba takes its time to load

    by_row = [_parts(row, num_tokens, kv) for row, num_tokens in enumerate(lengths)]
    parts = [part for own in by_row for part in own]
    if len(parts) == len(lengths):
        attend_parts(queries, kv, block_table, parts, states)
        return
    computed = Partial.empty((len(parts), *queries.shape[1:]), queries.device)
    attend_parts(queries, kv, block_table, parts, computed)
    first = 0
    for row, own in enumerate(by_row):
        merge(computed[first : first + len(own)], states[row])
        first += len(own)


def _parts(row: int, num_tokens: int, kv: torch.Tensor) -> list[tuple[int, int, int]]:
    """(row, first token, number of tokens) of equal parts, one for a row without tokens too."""
    side_bytes = num_tokens * kv.shape[3] * kv.shape[4] * kv.itemsize
    size = ceil_div(num_tokens, max(1, min(torch.get_num_threads(), side_bytes // MIN_PART_BYTES)))
    return [(row, first, min(size, num_tokens - first)) for first in range(0, max(1, num_tokens), max(1, size))]


def _attend_row(queries: torch.Tensor, kv: torch.Tensor, ids: torch.Tensor, num_tokens: int, state: Partial) -> None:
    """queries `[kv_heads, group, head_dim]`, scaled; the state is of the same shape."""
    block_tokens = kv.shape[2]
    step = max(1, SEGMENT_TOKENS // block_tokens)
    for first in range(0, ceil_div(num_tokens, block_tokens), step):
        blocks = ids[first : min(first + step, ceil_div(num_tokens, block_tokens))]
        size = min(step * block_tokens, num_tokens - first * block_tokens)
        keys, values = (  # [kv_heads, tokens, head_dim]; what lies behind the row may be NaN
            kv[:, side].index_select(0, blocks).flatten(0, 1)[:size].float().transpose(0, 1) for side in (KEYS, VALUES)
        )
        scores = torch.bmm(queries, keys.mT)
        _to_weights(scores, state)
        state.acc.baddbmm_(scores, values)


def _to_weights(scores: torch.Tensor, state: Partial) -> None:
    """In place: scores `[kv_heads, group, tokens]` become exp(score − m), and the state takes m and e over."""
    m = torch.maximum(state.m, scores.amax(-1))
    decay = torch.exp(state.m - m)
    scores.sub_(m.unsqueeze(-1)).exp_()
    state.m.copy_(m)
    state.e.mul_(decay).add_(scores.sum(-1))
    state.acc.mul_(decay.unsqueeze(-1))


@torch.inference_mode()
def prefill_micro_attention(
    q: torch.Tensor,
    query_start: torch.Tensor,
    kv: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    scale: float,
    out: Partial,
) -> None:
    """table: (block_table, num_kv_tokens, causal_offset or None)."""
    out.fill_neutral()
    block_table, num_kv_tokens, causal_offset = table
    starts = query_start.tolist()
    offsets = [None] * len(num_kv_tokens) if causal_offset is None else causal_offset.tolist()
    for row, (num_tokens, offset) in enumerate(zip(num_kv_tokens.tolist(), offsets, strict=True)):
        first = starts[row] + max(0, -(offset or 0))  # queries before it see no token at all
        chunk = slice(first, starts[row + 1])
        if first < chunk.stop:
            _prefill_row(
                q[chunk], kv, block_table[row], _spans(chunk.stop - first, num_tokens, offset), scale, out[chunk]
            )


def _spans(num_queries: int, num_tokens: int, causal_offset: int | None) -> list[tuple[int, int, bool]]:
    """The KV tokens that queries see, as (first, end, is_triangle): what all of them see, cut into segments, then the triangle.

    In the triangle query i sees its tokens 0 … i.
    """
    seen_by_all = num_tokens if causal_offset is None else min(max(0, causal_offset), num_tokens)
    firsts = range(0, seen_by_all, PREFILL_SEGMENT_TOKENS)
    spans = [(first, min(first + PREFILL_SEGMENT_TOKENS, seen_by_all), False) for first in firsts]
    end = min(num_tokens, seen_by_all + num_queries)
    return spans if causal_offset is None or end == seen_by_all else [*spans, (seen_by_all, end, True)]


def _prefill_row(
    q: torch.Tensor, kv: torch.Tensor, ids: torch.Tensor, spans: list[tuple[int, int, bool]], scale: float, out: Partial
) -> None:
    """One row's chunk of queries. K and V are copied a span at a time, and only tokens that are valid."""
    block_tokens, kv_heads = kv.shape[2:4]
    queries = q.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, queries, head_dim]
    parts = []
    for first, end, is_triangle in spans:
        blocks = ids[first // block_tokens : ceil_div(end, block_tokens)]
        tokens = slice(first % block_tokens, first % block_tokens + end - first)
        sides = (kv[:, side].index_select(0, blocks).flatten(0, 1)[tokens].float() for side in (KEYS, VALUES))
        keys, values = (side.transpose(0, 1).unsqueeze(1).expand(-1, queries.shape[1], -1, -1) for side in sides)
        attention, lse = _attend(queries, keys, values, is_triangle, scale)
        attention, lse = (x.movedim(2, 0).flatten(1, 2) for x in (attention, lse))
        parts.append(Partial(attention, lse, torch.ones_like(lse)))
    if len(parts) == 1:
        out.copy_(parts[0])
    elif parts:
        merge(Partial.stack(parts), out)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_triangle: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised attention and logsumexp over the tokens, fp32: a partial state with e = 1."""
    if q.is_cpu:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_triangle, scale=scale)
    return _attend_plainly(q, k, v, is_triangle, scale)


def _attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_triangle: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on any device."""
    scores = q @ k.transpose(-1, -2) * scale
    if is_triangle:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(unseen, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ v, lse


def merge(parts: Partial, out: Partial) -> None:
    """Weights of zero are selected away, never multiplied: an empty part may hold NaN."""
    if not len(parts.m):
        out.fill_neutral()
        return
    seen = parts.m != -torch.inf
    torch.amax(parts.m, 0, out=out.m)
    weights = torch.exp(parts.m - out.m)  # NaN where all parts are empty: not seen either
    torch.sum(torch.where(seen, parts.e * weights, 0.0), 0, out=out.e)
    torch.sum(torch.where(seen.unsqueeze(-1), parts.acc * weights.unsqueeze(-1), 0.0), 0, out=out.acc)


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    block_tokens = kv.shape[2]
    block, offset = (slots // block_tokens).long(), (slots % block_tokens).long()
    kv[block, KEYS, offset] = k
    kv[block, VALUES, offset] = v


def gather_blocks(kv_pool: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return kv_pool.index_select(0, ids)


def scatter_blocks(kv_pool: torch.Tensor, ids: torch.Tensor, data: torch.Tensor) -> None:
    kv_pool.index_copy_(0, ids.long(), data)
