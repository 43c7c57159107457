"""DistAttention (paper.md §2) over a transport: a layer's attention of one instance, with parts of the KV on others.

The debtor's side is `DistAttention`, another `attend` of the decoder; the creditor's is `Serving`. Both know tokens, blocks and
peers, and no scheduler: what is read where is agreed before the step, and stays as it is until its end. Serving waits for queries
alone, never for anything that this instance reads elsewhere, so that two instances may read from each other.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from infreal.kernels import Partial, merge, micro_attention, prefill_micro_attention
from infreal.kernels.partial import packed_numel
from infreal.model import LocalAttention
from infreal.transport import Transport, TransportError

QUERY, ANSWER, STORE, FETCH = range(4)  # what a message carries; blocks go by the transport's lane 1, see `lane_of`
GOES_ON, ENDED = 1.0, 0.0  # the last element of a query message


class Query:
    """The queries of one layer for one creditor, in one message of fixed size; or, in their place, that the read has ended."""

    def __init__(self, num_tokens: int, heads: int, head_dim: int, like: torch.Tensor, word: float = GOES_ON) -> None:
        self.message = like.new_full((num_tokens * heads * head_dim + 1,), word)
        self.q = self.message[:-1].view(num_tokens, heads, head_dim)

    @property
    def has_ended(self) -> bool:
        return bool(self.message[-1] == ENDED)


def tag_of(kind: int, number: int) -> int:
    """Mailbox of a message; `number` is that of the debtor's read or transfer, so nothing of an earlier one lies in it."""
    return number << 2 | kind


@dataclass(frozen=True, slots=True)
class RemotePart:
    """What one creditor computes in each iteration of a step. index `[tokens]` int64: the tokens of the batch that read there."""

    peer: int
    read: int
    index: torch.Tensor


class DistAttention:
    """`attend` of an iteration whose rows have KV elsewhere. `wait_s`: time spent waiting for others so far, by `now_s()`.

    deadline_s: the longest wait for the answers of one layer. Where one does not come the iteration goes on without that creditor,
    since other ranks take part in it, and is void: `errors` says by creditor what has happened.
    """

    def __init__(
        self,
        local: LocalAttention,
        parts: Sequence[RemotePart],
        transport: Transport,
        now_s: Callable[[], float],
        deadline_s: float,
    ) -> None:
        self.local, self.parts, self.transport, self.deadline_s = local, parts, transport, deadline_s
        self._now_s = now_s
        self.wait_s = 0.0
        self.errors: dict[int, TransportError] = {}
        self._states: Partial | None = None  # [1 + parts, tokens, heads, …]: here, then each creditor
        self._answers: list[torch.Tensor] = []
        self._queries: list[Query] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._states is None:
            self._states = self._make_room(q)
        receives = self._ask_all(q)
        self.local.write(layer, k, v)
        self.local.partial(layer, q, self._states[0])
        self._wait(receives)
        for i, (part, answer) in enumerate(zip(self.parts, self._answers, strict=True), 1):
            computed = Partial.packed(answer, len(part.index), *q.shape[1:])
            for name in ("acc", "m", "e"):
                getattr(self._states, name)[i].index_copy_(0, part.index, getattr(computed, name))
        return merge(self._states, backend=self.local.options["backend"]).output()

    def _make_room(self, q: torch.Tensor) -> Partial:
        """Tokens that read nothing at a creditor keep the neutral element there, in all layers."""
        numels = [packed_numel(len(part.index), *q.shape[1:]) for part in self.parts]
        self._answers = [torch.zeros(numel, dtype=torch.float32, device=q.device) for numel in numels]
        self._queries = [Query(len(part.index), *q.shape[1:], q) for part in self.parts]
        return Partial.neutral((1 + len(self.parts), *q.shape), q.device)

    def _ask_all(self, q: torch.Tensor) -> dict[int, Any]:
        """Send the creditors their queries of a layer. Returns the handles of their answers, by creditor."""
        receives = {}
        for part, query, answer in zip(self.parts, self._queries, self._answers, strict=True):
            if part.peer not in self.errors:
                torch.index_select(q, 0, part.index, out=query.q)
                with self._noting(part.peer):
                    receive = self.transport.post_recv(part.peer, tag_of(ANSWER, part.read), answer)
                    self.transport.send(part.peer, tag_of(QUERY, part.read), query.message)
                    receives[part.peer] = receive
        return receives

    def _wait(self, receives: Mapping[int, Any]) -> None:
        started_s, end_s = self._now_s(), time.monotonic() + self.deadline_s
        for peer, receive in receives.items():
            with self._noting(peer):
                self.transport.wait(receive, end_s)
        self.wait_s += self._now_s() - started_s

    @contextmanager
    def _noting(self, peer: int) -> Iterator[None]:
        try:
            yield
        except TransportError as error:
            self.errors[peer] = error


class Serving:
    """A read that is served: MicroAttention over the same blocks for the same rows, layer after layer.

    num_tokens: query tokens of each row, rows of one first; tables: the blocks that each row sees, all full.
    """

    def __init__(self, pool: torch.Tensor, num_tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        self.kv_pool = pool
        self.num_tokens = sum(num_tokens)
        self._num_decode = sum(n == 1 for n in num_tokens)
        lengths = torch.tensor([len(table) for table in tables], dtype=torch.int32)
        table = torch.zeros(len(tables), int(lengths.max()), dtype=torch.int32)
        for line, blocks in zip(table, tables, strict=True):
            line[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        starts = torch.tensor([0, *num_tokens[self._num_decode :]]).cumsum(0).to(torch.int32)
        self._table, self._kv_tokens, self._starts = (
            t.to(pool.device) for t in (table, lengths * pool.shape[3], starts)
        )

    def answer(self, layer: int, q: torch.Tensor, scale: float, backend: str) -> torch.Tensor:
        """q `[tokens, heads, head_dim]` → the packed partial state, fp32."""
        message = torch.empty(packed_numel(*q.shape), dtype=torch.float32, device=q.device)
        out, n = Partial.packed(message, *q.shape), self._num_decode
        options = {"layer": layer, "scale": scale, "backend": backend}
        if n:
            micro_attention(q[:n], self.kv_pool, self._table[:n], self._kv_tokens[:n], out=out[:n], **options)
        if n < len(self._table):
            rows = (q[n:], self._starts, self.kv_pool, self._table[n:], self._kv_tokens[n:], None)
            prefill_micro_attention(*rows, out=out[n:], **options)
        return message
