"""Three ways to compute decode attention of one layer over several instances, all exact (the paper's Fig. 11).

- DistAttention: the query goes to the KV; a partial state comes back from every creditor.
- Ring attention: the KV goes round; every instance computes its own queries against each part as it passes.
- Tensor parallel (head split): every instance holds all tokens of some heads; queries go out, outputs come back.

They are written per rank over `Transport`, and each says what it must put on the wire. Headers (shapes, tables, lengths)
belong to the control plane: every rank knows them beforehand.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infreal.kernels import Partial, merge, micro_attention
from infreal.kernels.partial import packed_numel, partial_bytes
from infreal.transport import Transport

QUERY, ANSWER, SHARD = 0, 1, 2  # tags


@dataclass(frozen=True)
class Table:
    """Where the rows' tokens lie in a pool: block_table `[rows, max_blocks]` and num_tokens `[rows]`, both int32."""

    block_table: torch.Tensor
    num_tokens: torch.Tensor

    def rows(self, rows: slice) -> "Table":
        return Table(self.block_table[rows], self.num_tokens[rows])


@dataclass(frozen=True)
class Exchange:
    """One rank's side of one attention. Every wait within it ends by `timeout_s` after the start of the call."""

    transport: Transport
    num_ranks: int
    backend: str
    scale: float
    timeout_s: float = 60.0

    def peers(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.transport.rank]

    def attend(self, q: torch.Tensor, kv_pool: torch.Tensor, table: Table, out: Partial | None = None) -> Partial:
        """MicroAttention over a pool of one layer."""
        return micro_attention(
            q, kv_pool, table.block_table, table.num_tokens, layer=0, scale=self.scale, backend=self.backend, out=out
        )


def dist_attention(x: Exchange, home: int, q: torch.Tensor, kv_pool: torch.Tensor, table: Table) -> torch.Tensor | None:
    """q `[rows, heads, head_dim]`: the queries at home, memory to receive them into elsewhere. Home returns the output."""
    deadline_s = time.monotonic() + x.timeout_s
    rows, heads, head_dim = q.shape
    if x.transport.rank != home:
        x.transport.wait(x.transport.post_recv(home, QUERY, q), deadline_s)
        answer = torch.empty(packed_numel(*q.shape), device=q.device)
        x.attend(q, kv_pool, table, out=Partial.packed(answer, rows, heads, head_dim))
        x.transport.send(home, ANSWER, answer)
        return None
    peers = x.peers()
    answers = torch.empty(len(peers) + 1, packed_numel(*q.shape), device=q.device)
    handles = [x.transport.post_recv(peer, ANSWER, answers[i]) for i, peer in enumerate(peers)]
    for peer in peers:
        x.transport.send(peer, QUERY, q)
    parts = Partial.packed(answers, rows, heads, head_dim)
    x.attend(q, kv_pool, table, out=parts[len(peers)])
    for handle in handles:
        x.transport.wait(handle, deadline_s)
    return merge(parts, backend=x.backend).output()


def ring_attention(
    x: Exchange, q: torch.Tensor, rows: slice, kv_pool: torch.Tensor, tables: Sequence[Table]
) -> torch.Tensor:
    """q: queries of the rows that live here (maybe none). tables: for every rank, all rows in that rank's part.

    kv_pool `[blocks, 1, 2, block_tokens, kv_heads, head_dim]` holds this rank's part and nothing else: it is what is shipped.
    Parts have equal numbers of blocks. Each rank sends num_ranks − 1 parts to the rank on its right.
    """
    deadline_s = time.monotonic() + x.timeout_s
    rank, n = x.transport.rank, x.num_ranks
    left, right = (rank - 1) % n, (rank + 1) % n
    here, spare = kv_pool, [torch.empty_like(kv_pool) for _ in range(min(2, n - 1))]
    states = []
    for step in range(n):
        is_last = step == n - 1
        if not is_last:
            arriving = spare[step % 2]
            handle = x.transport.post_recv(left, SHARD, arriving)
            x.transport.send(right, SHARD, here)
        if len(q):
            states.append(x.attend(q, here, tables[(rank - step) % n].rows(rows)))
        if not is_last:
            x.transport.wait(handle, deadline_s)
            here = arriving
    return merge(states, backend=x.backend).output() if len(q) else torch.empty(q.shape, device=q.device)


def tensor_parallel_attention(
    x: Exchange, home: int, q: torch.Tensor, kv_pool: torch.Tensor, table: Table
) -> torch.Tensor | None:
    """kv_pool: all tokens, the rank's kv_heads / num_ranks heads. q: all heads at home, elsewhere memory for the rank's.

    Outputs come back normalised in q's dtype, as they would go on to the output projection. Home returns all heads.
    """
    deadline_s = time.monotonic() + x.timeout_s
    rank = x.transport.rank
    if rank != home:
        x.transport.wait(x.transport.post_recv(home, QUERY, q), deadline_s)
        x.transport.send(home, ANSWER, x.attend(q, kv_pool, table).output().to(q.dtype))
        return None
    share = q.shape[1] // x.num_ranks
    slices = [q[:, i * share : (i + 1) * share].contiguous() for i in range(x.num_ranks)]
    outputs = [torch.empty_like(part) for part in slices]
    handles = [x.transport.post_recv(peer, ANSWER, outputs[peer]) for peer in x.peers()]
    for peer in x.peers():
        x.transport.send(peer, QUERY, slices[peer])
    outputs[rank] = x.attend(slices[rank], kv_pool, table).output().to(q.dtype)
    for handle in handles:
        x.transport.wait(handle, deadline_s)
    return torch.cat(outputs, dim=1)


@dataclass(frozen=True)
class WireShape:
    """A decode step of one layer, as far as the wire is concerned."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    def query_bytes(self) -> int:
        return self.rows * self.heads * self.head_dim * self.element_bytes

    def kv_bytes(self, tokens: int) -> int:
        """K and V of so many tokens."""
        return 2 * tokens * self.kv_heads * self.head_dim * self.element_bytes


def dist_attention_bytes(shape: WireShape, creditors: int) -> int:
    """A query to every creditor, a partial state (fp32) back."""
    return creditors * (shape.query_bytes() + partial_bytes(shape.rows, shape.heads, shape.head_dim))


def ring_attention_bytes(shape: WireShape, tokens: int, num_ranks: int) -> int:
    """What one rank receives (and sends): every other rank's equal part of the rows' tokens."""
    return shape.kv_bytes(tokens) * (num_ranks - 1) // num_ranks


def tensor_parallel_bytes(shape: WireShape, num_ranks: int) -> int:
    """Queries out to and outputs back from all ranks but home."""
    return 2 * shape.query_bytes() * (num_ranks - 1) // num_ranks
