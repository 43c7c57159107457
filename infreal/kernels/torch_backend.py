"""The torch twins: any device, no compilation; on a CPU they serve.

A row's KV is worked off in segments that fit the cache. Within a segment, K and V are read where they lie whenever that
makes matrix products of a useful size (`_tiles`), so no copy of the whole KV is ever made; the scores of a segment
are the only scratch. Decode rows with little KV go through a compiled loop instead where numba is installed (`numba_decode`): so
many calls of torch for each row and layer would cost more than reading it. What the kernels' contract says of shapes is not
repeated here.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec

import torch

from infreal.kernels.parallel import run_all
from infreal.kernels.partial import Partial
from infreal.kernels.sizes import ceil_div

SEGMENT_TOKENS = 2048  # the scores of a segment (256 KB for 32 heads) stay in the L2 cache; measured: 256 to 2,048
MIN_TILE_BYTES = 48 * 1024  # below this a copy into one matrix costs less than one more call per tile (about 4 µs)
MIN_PART_BYTES = 2 << 20  # of K or V: about 0.2 ms of reading, several times what a task costs to hand over
HAS_NUMBA = find_spec("numba") is not None
PREFILL_SEGMENT_TOKENS = 8192  # of K and V copied at a time: 64 MB for 8 KV heads of 128

KEYS, VALUES = 0, 1  # the third axis of the pool
TOKENS_LAST, TOKENS_FIRST = (
    -1,
    -2,
)  # the token axis of a tile: keys [.., head_dim, tokens], values [.., tokens, head_dim]


@torch.inference_mode()
def micro_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    num_local_tokens: torch.Tensor,
    scale: float,
    out: Partial,
) -> None:
    """kv: one layer of the pool, `[blocks, 2, block_tokens, kv_heads, head_dim]`.

    A row with enough KV is cut over the threads and merged, which depends on the row and the number of threads alone.
    """
    kv_heads = kv.shape[3]
    queries = (q.float() * scale).unflatten(1, (kv_heads, -1))
    states = Partial(*(t.unflatten(1, (kv_heads, -1)) for t in (out.acc, out.m, out.e)))
    lengths = num_local_tokens.tolist()
    short = [row for row, num_tokens in enumerate(lengths) if _is_short(num_tokens, kv)]
    if short:
        from infreal.kernels.numba_decode import attend_rows  # numba takes its time to load

        attend_rows(queries, kv, block_table, num_local_tokens, short, states)
    if len(short) < len(lengths):
        rest = {row: num_tokens for row, num_tokens in enumerate(lengths) if not _is_short(num_tokens, kv)}
        _attend_in_segments(queries, kv, block_table, rest, states)


def _attend_in_segments(
    queries: torch.Tensor, kv: torch.Tensor, block_table: torch.Tensor, lengths: dict[int, int], states: Partial
) -> None:
    """lengths: row of the batch → its tokens."""
    tasks: list[Callable[[], None]] = []
    cut_rows: list[tuple[int, Partial]] = []
    for row, num_tokens in lengths.items():
        num_parts = _num_parts(num_tokens, kv)
        rounds = ceil_div(num_tokens, num_parts * SEGMENT_TOKENS)  # equally many segments for each part
        segment_tokens = ceil_div(num_tokens, max(1, num_parts * rounds))
        segments = list(_segments(block_table[row], num_tokens, kv.shape[2], segment_tokens))
        if num_parts == 1:
            tasks.append(partial(_add_segments, states[row].fill_neutral(), queries[row], kv, segments))
            continue
        parts = Partial.neutral((num_parts, *queries[row].shape), queries.device)
        cut_rows.append((row, parts))
        for i in range(num_parts):
            tasks.append(partial(_add_segments, parts[i], queries[row], kv, segments[i::num_parts]))
    run_all(tasks)
    for row, parts in cut_rows:
        merge(parts, states[row])


def _is_short(num_tokens: int, kv: torch.Tensor) -> bool:
    """Whether one thread suffices for a row, in the compiled loop."""
    return kv.is_cpu and kv.dtype == torch.float32 and HAS_NUMBA and _side_bytes(num_tokens, kv) < MIN_PART_BYTES


def _side_bytes(num_tokens: int, kv: torch.Tensor) -> int:
    """Of the K, or the V, of so many tokens."""
    return num_tokens * kv.shape[3] * kv.shape[4] * kv.itemsize


def _num_parts(num_tokens: int, kv: torch.Tensor) -> int:
    """How many threads a row of so many tokens is worth."""
    return max(1, min(torch.get_num_threads(), _side_bytes(num_tokens, kv) // MIN_PART_BYTES)) if kv.is_cpu else 1


def _segments(
    table: torch.Tensor, num_tokens: int, block_tokens: int, segment_tokens: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields (block ids, number of valid tokens in them), whole blocks but for the end of the row."""
    step = max(1, ceil_div(segment_tokens, block_tokens))
    for first in range(0, ceil_div(num_tokens, block_tokens), step):
        tokens = min(step * block_tokens, num_tokens - first * block_tokens)
        yield table[first : first + ceil_div(tokens, block_tokens)], tokens


@torch.inference_mode()
def _add_segments(
    state: Partial, queries: torch.Tensor, kv: torch.Tensor, segments: Iterable[tuple[torch.Tensor, int]]
) -> None:
    """queries `[kv_heads, group, head_dim]`, scaled; the state is of the same shape. Grad modes belong to a thread.

    The scores of a segment, `[tiles, kv_heads, group, tokens of a tile]`, are the same memory for all segments alike.
    """
    scores, tile_scores = queries.new_empty(0), ()
    for ids, num_tokens in segments:
        keys = _tiles(kv[:, KEYS], ids, num_tokens, TOKENS_LAST)
        shape = (len(keys), *queries.shape[:2], keys[0].shape[-1])
        if scores.shape != shape:
            scores = queries.new_empty(shape)
            tile_scores = scores.unbind(0)
        for out, tile in zip(tile_scores, keys, strict=True):
            torch.bmm(queries, tile, out=out)
        _to_weights(scores, state)
        for weights, tile in zip(tile_scores, _tiles(kv[:, VALUES], ids, num_tokens, TOKENS_FIRST), strict=True):
            state.acc.baddbmm_(weights, tile)


def _tiles(side: torch.Tensor, ids: torch.Tensor, num_tokens: int, token_axis: int) -> tuple[torch.Tensor, ...]:
    """The tokens of some blocks as equal matrices `[kv_heads, …]` fp32, in place where that pays.

    side: K or V of one layer, `[blocks, block_tokens, kv_heads, head_dim]`. K and V of a block alternate in the pool, so
    consecutive blocks are no single matrix; but their i-th tokens are: a run of n blocks gives block_tokens tiles
    of n tokens. Scattered blocks give a tile each. Only valid tokens are touched: what lies behind them may be NaN.
    """
    block_ids = ids.tolist()
    first, num_blocks, block_tokens = block_ids[0], len(block_ids), side.shape[1]
    is_run = num_blocks > block_tokens and block_ids == list(range(first, first + num_blocks))
    tile_bytes = max(num_blocks * is_run, block_tokens) * side[0, 0].nbytes
    if (
        side.dtype == torch.float32
        and side.is_cpu
        and num_tokens == num_blocks * block_tokens
        and tile_bytes >= MIN_TILE_BYTES
    ):
        if is_run:
            return side[first : first + num_blocks].movedim(0, token_axis).unbind(0)
        blocks = side.movedim(1, token_axis)
        return tuple(blocks[i] for i in block_ids)
    copied = side.index_select(0, ids).flatten(0, 1)[:num_tokens]
    return (copied.float().movedim(0, token_axis),)


def _to_weights(scores: torch.Tensor, state: Partial) -> None:
    """In place: scores `[tiles, kv_heads, queries, tokens]` become exp(score − m), and the state takes m and e over."""
    m = torch.maximum(state.m, scores.amax(0).amax(-1))
    shift = m.masked_fill(m == -torch.inf, 0.0)  # a query that has seen no token yet: exp(−inf − 0) = 0
    decay = torch.exp(state.m - shift)
    scores.sub_(shift.unsqueeze(-1)).exp_()
    state.m.copy_(m)
    state.e.mul_(decay).add_(scores.sum(0).sum(-1))
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
