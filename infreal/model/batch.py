"""What one iteration computes: decode rows and prefill chunks side by side, as the tensors the kernels read.

Knows no scheduler: whoever runs an instance says which tokens of which request go where.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Row:
    """One request in one iteration: its new tokens, and where the KV held on this instance lies.

    token_ids: the new tokens (one: decode; several: a prefill chunk). position: global position of the first of them.
    block_ids: the request's KV blocks held here, in order. num_kv_tokens: tokens in them, the new ones included and last;
    None where the whole request is here (position + new tokens). Blocks held elsewhere are simply not listed: only
    sealed blocks of earlier tokens are ever moved, so the new tokens see every local token before them.
    """

    token_ids: Sequence[int]
    position: int
    block_ids: Sequence[int]
    num_kv_tokens: int | None = None
    wants_logits: bool = True

    @property
    def num_local_tokens(self) -> int:
        return self.position + len(self.token_ids) if self.num_kv_tokens is None else self.num_kv_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one new token first (`num_decode_rows` of them), then the prefill chunks; `order` maps back to the caller's.

    token_ids, positions, slots `[tokens]` int64 (slot: block id × block_tokens + offset); block_table `[rows, max_blocks]`,
    num_kv_tokens, causal_offset `[rows]`, all int32 (causal_offset: KV tokens held here before the row's first new one);
    prefill_start `[prefill rows + 1]` int32, counted from the first prefill token; logits_index `[rows that want logits]`
    int64, the last token of each, in the order in which the caller listed the rows. `order[i]`: the caller's index of row i.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    num_kv_tokens: torch.Tensor
    causal_offset: torch.Tensor
    prefill_start: torch.Tensor
    logits_index: torch.Tensor
    num_decode_rows: int
    order: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return len(self.order)


def make_batch(rows: Sequence[Row], block_tokens: int, device: torch.device | str = "cpu") -> Batch:
    """Raises ValueError where a row has no token, or its blocks cannot hold its tokens."""
    for row in rows:
        _check_row(row, block_tokens)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids) > 1)
    ordered = [rows[i] for i in order]
    counts = np.array([len(row.token_ids) for row in ordered], dtype=np.int64)
    ends = counts.cumsum()
    num_kv = np.array([row.num_local_tokens for row in ordered], dtype=np.int64)
    num_decode = int((counts == 1).sum())
    last_token = dict(zip(order, ends - 1, strict=True))
    tensors = {
        "token_ids": np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in ordered]),
        "positions": _spans([row.position for row in ordered], counts),
        "slots": _slots(ordered, num_kv - counts, counts, block_tokens),
        "block_table": _block_table(ordered),
        "num_kv_tokens": num_kv.astype(np.int32),
        "causal_offset": (num_kv - counts).astype(np.int32),
        "prefill_start": np.concatenate([[0], counts[num_decode:].cumsum()]).astype(np.int32),
        "logits_index": np.array([last_token[i] for i, row in enumerate(rows) if row.wants_logits], dtype=np.int64),
    }
    on_device = {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in tensors.items()}
    return Batch(**on_device, num_decode_rows=num_decode, order=tuple(order))


def _check_row(row: Row, block_tokens: int) -> None:
    new, held = len(row.token_ids), row.num_local_tokens
    if not new <= held <= len(row.block_ids) * block_tokens:
        raise ValueError(f"{held} KV tokens, {new} of them new, in {len(row.block_ids)} blocks of {block_tokens}")
    if new < 1:
        raise ValueError("a row needs at least one new token")


def _spans(firsts: Sequence[int], counts: np.ndarray) -> np.ndarray:
    """first, first + 1, … for each row, one after the other."""
    return np.concatenate([np.arange(first, first + n) for first, n in zip(firsts, counts, strict=True)])


def _slots(rows: Sequence[Row], firsts: np.ndarray, counts: np.ndarray, block_tokens: int) -> np.ndarray:
    slots = []
    for row, first, count in zip(rows, firsts, counts, strict=True):
        local = np.arange(first, first + count)
        first_block = first // block_tokens
        blocks = np.asarray(row.block_ids[first_block : (first + count - 1) // block_tokens + 1], dtype=np.int64)
        slots.append(blocks[local // block_tokens - first_block] * block_tokens + local % block_tokens)
    return np.concatenate(slots)


def _block_table(rows: Sequence[Row]) -> np.ndarray:
    table = np.zeros((len(rows), max(len(row.block_ids) for row in rows)), dtype=np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row.block_ids)] = row.block_ids
    return table
