"""Decode MicroAttention of rows with little KV, all in the same few calls of torch.

Each row is cut into pieces of one size, so that its result does not depend on its neighbours. What the last piece lacks is filled
up with the piece's first token, behind a mask: what lies in the pool behind the row's end may be NaN.
"""

import torch

from infreal.kernels.partial import Partial

PIECE_TOKENS = 128  # few pieces, and little of the last one empty


def micro_attention_together(
    queries: torch.Tensor, kv: torch.Tensor, block_table: torch.Tensor, lengths: dict[int, int]
) -> Partial:
    """States `[parts, rows, kv_heads, group, …]` that are still to be merged.

    queries: `[batch, kv_heads, group, head_dim]` fp32, scaled; kv: one layer of the pool; lengths: row of the batch → its tokens.
    """
    pieces = [
        (row, place, first, num_tokens)
        for place, (row, num_tokens) in enumerate(lengths.items())
        for first in range(0, num_tokens, PIECE_TOKENS)
    ]
    row, place, first, num_tokens = torch.tensor(pieces).unbind(1)
    position = first.unsqueeze(1) + torch.arange(PIECE_TOKENS)
    is_missing = position >= num_tokens.unsqueeze(1)
    position = torch.where(is_missing, first.unsqueeze(1), position)
    block_tokens = kv.shape[2]
    block = block_table[row.unsqueeze(1), position // block_tokens]
    keys, values = _copy_tokens(kv, block.long(), position % block_tokens)

    shape = (len(pieces), *queries.shape[1:3], -1)  # [pieces, kv_heads, group, …]
    scores = torch.bmm(queries[row].flatten(0, 1), keys.mT).view(shape)
    scores.masked_fill_(is_missing[:, None, None], -torch.inf)
    m = scores.amax(-1)
    weights = scores.sub_(m.unsqueeze(-1)).exp_()
    acc = torch.bmm(weights.flatten(0, 1), values).view(shape)

    number = first // PIECE_TOKENS
    parts = Partial.neutral((int(number.max()) + 1, len(lengths), *queries.shape[1:]), queries.device)
    parts.acc[number, place], parts.m[number, place], parts.e[number, place] = acc, m, weights.sum(-1)
    return parts


def _copy_tokens(kv: torch.Tensor, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """K and V of tokens, `[2, pieces × kv_heads, tokens, head_dim]` fp32; block and offset `[pieces, tokens]`."""
    num_blocks, _, block_tokens, kv_heads, head_dim = kv.shape
    stride, side = (
        kv.stride(0) // head_dim,
        block_tokens * kv_heads,
    )  # in vectors of a head, of which the pool is a dense array
    vectors = kv.as_strided(((num_blocks - 1) * stride + 2 * side, head_dim), (head_dim, 1))
    keys = (block * stride + offset * kv_heads).unsqueeze(1) + torch.arange(kv_heads).unsqueeze(1)
    copied = vectors.index_select(0, torch.stack((keys, keys + side)).flatten())
    return copied.float().view(2, -1, block.shape[1], head_dim)
