"""Device functions that the attention kernels share. Values and strides: offsets into the pool are 64-bit."""

import triton
import triton.language as tl


@triton.jit
def find_row(counts, unit):
    """The row whose units hold `unit`, and the unit's place within that row; counts: `[ROWS]`, units of each row."""
    ends = tl.cumsum(counts, 0)
    row = tl.sum((ends <= unit).to(tl.int32), 0)
    return row, unit - tl.sum(tl.where(ends <= unit, counts, 0), 0)


@triton.jit
def add_tokens(
    state,
    queries,
    keys,
    values,
    table,
    tokens,
    stop,
    visible,
    scale,
    stride_block,
    stride_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One step of the online softmax over a tile of tokens `[N]` of one KV head; state is (acc `[M, D]`, m `[M]`, e `[M]`).

    Tokens from `stop` on do not exist: neither the table nor the pool is read there, K and V count as zero (what lies
    there may be NaN). A query m sees the tokens below visible[m].
    """
    acc, m, e = state
    exists = tokens < stop
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    block = tl.load(table + tokens // BLOCK_TOKENS, mask=exists, other=0).to(tl.int64)
    offsets = block * stride_block + (tokens % BLOCK_TOKENS) * stride_token
    k = tl.load(keys + offsets[None, :] + dims[:, None], mask=exists[None, :] & is_dim[:, None], other=0.0)
    v = tl.load(values + offsets[:, None] + dims[None, :], mask=exists[:, None] & is_dim[None, :], other=0.0)
    if UPCAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    s = tl.dot(queries, k, input_precision="ieee") * scale
    s = tl.where(tokens[None, :] < visible[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp(s - shift[:, None])
    decay = tl.exp(m - shift)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, m_new, e * decay + tl.sum(p, 1)


@triton.jit
def store_state(state, out_acc, out_m, out_e, slots, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(acc `[M, D]`, m `[M]`, e `[M]`) into the dense state arrays at `slots` `[M]` int64, where `valid`."""
    acc, m, e = state
    dims = tl.arange(0, BLOCK_D)
    tl.store(out_m + slots, m, mask=valid)
    tl.store(out_e + slots, e, mask=valid)
    tl.store(out_acc + slots[:, None] * HEAD_DIM + dims[None, :], acc, mask=valid[:, None] & (dims < HEAD_DIM)[None, :])
