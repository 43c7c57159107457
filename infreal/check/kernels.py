"""Kernels against fp64: decode, prefill behind a prefix, and both cut into parts and merged."""

from collections.abc import Iterator
from itertools import chain, product
from typing import NamedTuple

import torch

from infreal.check import Verdict
from infreal.kernels import Partial, merge, micro_attention, prefill_micro_attention

LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}  # the kernels' numeric rule (largest error)
HEADS = ((9, 3, 64), (32, 8, 128))  # heads, KV heads, head_dim
LENGTHS, BLOCK_TOKENS, NUM_QUERIES = (1, 17, 333, 1000), 16, 40


class Setting(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str
    backend: str

    @property
    def options(self) -> dict[str, object]:
        return {"layer": 1, "scale": self.head_dim**-0.5, "backend": self.backend}

    def queries(self, count: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1)
        return torch.randn(count, self.heads, self.head_dim, generator=draw).to(self.device, self.dtype)

    def index(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def check_kernels(device: str, backend: str) -> Iterator[Verdict]:
    for heads, dtype in product(HEADS, LIMITS):
        setting = Setting(*heads, dtype, device, backend)
        error, limit = max(chain(decode_errors(setting), prefill_errors(setting))), LIMITS[dtype]
        what = f"kernels, {str(dtype).removeprefix('torch.')}, {heads[0]} heads on {heads[1]} KV heads of {heads[2]}"
        yield Verdict(what, error <= limit, f"largest error {error:.1e} (at most {limit:.0e})")


class Rows:
    """Rows of several lengths in scattered blocks of a pool; whatever is no valid token is NaN."""

    def __init__(self, lengths: tuple[int, ...], setting: Setting) -> None:
        draw = torch.Generator().manual_seed(0)
        counts = [-(-n // BLOCK_TOKENS) for n in lengths]
        order = torch.randperm(sum(counts), generator=draw).to(torch.int32)
        shape = (sum(counts), 2, 2, BLOCK_TOKENS, setting.kv_heads, setting.head_dim)
        pool = torch.full(shape, torch.nan, dtype=setting.dtype)
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        self.sides: list[torch.Tensor] = []  # K and V of each row, fp64
        for row, (length, blocks) in enumerate(zip(lengths, order.split(counts), strict=True)):
            tables[row, : len(blocks)] = blocks
            kv = torch.randn(2, length, *shape[4:], generator=draw).to(setting.dtype)
            for i in range(length):
                pool[blocks[i // BLOCK_TOKENS], 1, :, i % BLOCK_TOKENS] = kv[:, i]
            self.sides.append(kv.double())
        self.pool, self.tables = pool.to(setting.device), tables.to(setting.device)
        self.lengths = setting.index(*lengths)

    def error(self, output: torch.Tensor, q: torch.Tensor, row: int, seen: int) -> float:
        """Of one query `[heads, head_dim]` over the first `seen` tokens of a row, against fp64."""
        group = q.shape[0] // self.sides[row].shape[2]
        k, v = self.sides[row][:, :seen].repeat_interleave(group, 2)
        weights = (torch.einsum("hd,thd->ht", q.double().cpu(), k) * q.shape[1] ** -0.5).softmax(1)
        return float((torch.einsum("ht,thd->hd", weights, v) - output.double().cpu()).abs().max())


def decode_errors(setting: Setting) -> Iterator[float]:
    """Whole rows, and the same rows as two parts that are merged."""
    rows, q = Rows(LENGTHS, setting), setting.queries(len(LENGTHS))
    cut = rows.lengths // 2 // BLOCK_TOKENS
    tails = torch.zeros_like(rows.tables)
    for tail, table, first in zip(tails, rows.tables, cut.tolist(), strict=True):
        tail[: len(table) - first] = table[first:]

    def state(tables: torch.Tensor, lengths: torch.Tensor) -> Partial:
        return micro_attention(q, rows.pool, tables, lengths, **setting.options)

    head_tokens = cut * BLOCK_TOKENS
    parts = [state(rows.tables, head_tokens), state(tails, rows.lengths - head_tokens)]
    for whole in (state(rows.tables, rows.lengths), merge(parts, backend=setting.backend)):
        for row, length in enumerate(LENGTHS):
            yield rows.error(whole.output()[row], q[row], row, length)


def prefill_errors(setting: Setting) -> Iterator[float]:
    """A chunk behind a prefix: whole, and with half of the KV as a remote part without a mask."""
    length, cut = 320, 160
    rows, q = Rows((length,), setting), setting.queries(NUM_QUERIES)
    prefix = length - NUM_QUERIES

    def state(table: torch.Tensor, num_tokens: int, offset: int | None) -> Partial:
        causal = None if offset is None else setting.index(offset)
        chunk, lengths = setting.index(0, NUM_QUERIES), setting.index(num_tokens)
        return prefill_micro_attention(q, chunk, rows.pool, table.contiguous(), lengths, causal, **setting.options)

    head, tail = rows.tables.split((cut // BLOCK_TOKENS, (length - cut) // BLOCK_TOKENS), dim=1)
    parts = [state(head, cut, None), state(tail, length - cut, prefix - cut)]
    for whole in (state(rows.tables, length, prefix), merge(parts, backend=setting.backend)):
        for i in range(NUM_QUERIES):
            yield rows.error(whole.output()[i], q[i], 0, prefix + i + 1)
