"""Executor: one instance at work. Runs the iterations it is told to run, serves the reads of others, copies blocks.

Owns the model, the KV pool and the token ids of the requests here, and knows how long their outputs are. It decides nothing: which
rows run, in which blocks, and what is read where comes from its manager (`layout`). Its peers are ranks of a transport; who carries
the managers' messages is the driver's business.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from infreal.dist_attention import ANSWER, ENDED, QUERY, DistAttention, Query, RemotePart, Serving, tag_of
from infreal.kernels import gather_blocks, scatter_blocks
from infreal.layout import ReadRow, StepRow
from infreal.model import Attend, Decoder, Row, make_batch
from infreal.transport import Transport, TransportError
from perfmodel.messages import IterationsDone, LoanId

Clock = Callable[[], float]


@dataclass(slots=True)
class Text:
    """The token ids of one attempt of a request: its prompt, and what it has generated here.

    It ends with `max_new` tokens, or with the first of `stop_ids`.
    """

    ids: list[int]
    num_prompt: int
    max_new: int
    stop_ids: Sequence[int] = ()

    @property
    def is_finished(self) -> bool:
        return len(self.ids) >= self.num_prompt + self.max_new or self.ids[-1] in self.stop_ids

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.num_prompt :]


class Unanswered(TransportError):
    """An iteration is void, since these creditors have not answered some rank. errors: what this one has seen, by creditor."""

    def __init__(self, peers: Sequence[int], errors: Mapping[int, TransportError]) -> None:
        super().__init__("; ".join(map(str, errors.values())) or f"{list(peers)} have not answered another rank")
        self.peers, self.errors = peers, errors


@dataclass(slots=True)
class Step:
    """The step in progress. num_iterations: how many it will have, as known now; begun, done: iterations."""

    number: int
    rows: list[StepRow]
    parts: list[RemotePart]
    start_s: float
    num_iterations: int
    stale: tuple[LoanId, ...] = ()
    begun: int = 0
    done: int = 0

    @property
    def is_over(self) -> bool:
        """No iteration of it will begin: it was cut, is not served, or has had its iterations."""
        return bool(self.stale) or self.done >= self.num_iterations


@dataclass(slots=True)
class Executor:
    """One instance, or one rank of it. deadline_s: the longest wait for a peer's answer to a layer · between_layers(): called
    before each layer's attention, by drivers that let others work meanwhile · watch_logits(req_id, logits): sees each new token's
    (tests)."""

    decoder: Decoder
    kv_pool: torch.Tensor
    backend: str
    transport: Transport
    now_s: Clock
    deadline_s: float = 10.0
    between_layers: Callable[[], None] | None = None
    watch_logits: Callable[[int, torch.Tensor], None] | None = None
    texts: dict[int, Text] = field(default_factory=dict)
    step: Step | None = None
    num_iterations: int = 0  # begun so far
    busy_s: float = 0.0  # in iterations
    core_s: float = 0.0  # of it: time in which the thread had its core

    @property
    def block_tokens(self) -> int:
        return self.kv_pool.shape[3]

    def warm_up(self, num_tokens: int = 256) -> None:
        """Touch the pool, which holds nothing yet, and compute a prompt and a token, so that no request pays for the first time."""
        num_tokens = min(num_tokens, len(self.kv_pool) * self.block_tokens)
        blocks = range(-(-num_tokens // self.block_tokens))
        for row in Row([0] * num_tokens, 0, blocks), Row([0], num_tokens - 1, blocks):
            batch = make_batch([row], self.block_tokens, self.kv_pool.device)
            self.decoder.forward(batch, self.decoder.local_attention(batch, self.kv_pool, self.backend))
        self.kv_pool.zero_()

    def accept(self, req_id: int, text: Text) -> None:
        """A new attempt of a request comes here."""
        self.texts[req_id] = text

    # ---- a step --------------------------------------------------------------------------------------------------------------
    def start(
        self,
        number: int,
        max_iterations: int,
        rows: list[StepRow],
        reads: Mapping[int, tuple[int, Sequence[int]]],
        stale: tuple[LoanId, ...] = (),
    ) -> None:
        """reads: creditor → (number of the read, which tokens of the batch read there); stale: loans that are not served after
        all."""
        assert self.step is None, f"step {self.step} has not ended"
        device = self.kv_pool.device
        parts = [RemotePart(c, number, torch.tensor(tokens, device=device)) for c, (number, tokens) in reads.items()]
        self.step = Step(number, rows, parts, self.now_s(), max_iterations, stale)

    def cut(self) -> None:
        """End the step at the next boundary between iterations. Any thread may ask for it."""
        step = self.step
        if step is not None:
            step.num_iterations = min(step.num_iterations, step.begun)

    def proceed(self, added: Sequence[Sequence[int]]) -> IterationsDone:
        """One iteration of the step in progress. added: blocks that each row has got since the last one. Raises Unanswered, and
        GroupLost."""
        step = self.step
        assert step is not None, "no step is in progress"
        started_s, core_s = self.now_s(), time.thread_time()
        self.num_iterations += 1
        step.begun += 1
        finished, wait_s = self._iterate(step, added)
        step.done += 1
        seconds = self.now_s() - started_s
        self.busy_s += seconds
        self.core_s += time.thread_time() - core_s
        ended = bool(finished) or step.is_over
        return IterationsDone(step.number, 1, finished, ended, wait_s, iteration_s=seconds)

    def give_up(self) -> IterationsDone:
        """The step ends without a further token: it is over, or a peer does not answer."""
        assert self.step is not None, "no step is in progress"
        return IterationsDone(self.step.number, 0, (), ended=True, stale=self.step.stale)

    def end(self) -> Step:
        """Nothing is in progress any more. Returns the step that was."""
        assert self.step is not None, "no step is in progress"
        step, self.step = self.step, None
        return step

    def end_reads(self, parts: Sequence[RemotePart]) -> None:
        """Tell creditors on the data plane that a step has ended. Who is not there needs no word."""
        config = self.decoder.config
        for part in parts:
            query = Query(len(part.index), config.num_heads, config.head_dim, self.kv_pool, ENDED)
            with suppress(TransportError):
                self.transport.send(part.peer, tag_of(QUERY, part.read), query.message)

    def _iterate(self, step: Step, added: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], float]:
        """Compute one iteration and append its tokens. Returns the requests that have finished, and the time spent waiting."""
        for row, blocks in zip(step.rows, added, strict=True):
            row.blocks += blocks
            row.position += 1 if step.done else 0
        batch = make_batch([self._row(row) for row in step.rows], self.block_tokens, self.kv_pool.device)
        local = self.decoder.local_attention(batch, self.kv_pool, self.backend)
        dist = DistAttention(local, step.parts, self.transport, self.now_s, self.deadline_s) if step.parts else None
        logits = self.decoder.forward(batch, self._breathing(dist or local))
        if dist:
            self._agree(dist)
        finished = []
        yielding = [row for row in step.rows if row.yields]
        for row, token in zip(yielding, self.decoder.next_tokens(logits).tolist(), strict=True):
            text = self.texts[row.req_id]
            text.ids.append(token)
            if text.is_finished:
                finished.append(row.req_id)
        if self.watch_logits:
            for row, line in zip(yielding, self.decoder.whole_logits(logits), strict=True):
                self.watch_logits(row.req_id, line)
        return tuple(finished), dist.wait_s if dist else 0.0

    def _agree(self, dist: DistAttention) -> None:
        """All ranks drop an iteration in which any of them has missed an answer."""
        peers = [part.peer for part in dist.parts]
        missed = torch.tensor([float(peer in dist.errors) for peer in peers], device=self.kv_pool.device)
        counts = self.decoder.group.all_reduce(missed).tolist()
        unanswered = [peer for peer, count in zip(peers, counts, strict=True) if count]
        if unanswered:
            raise Unanswered(unanswered, dist.errors)

    def _row(self, row: StepRow) -> Row:
        ids = self.texts[row.req_id].ids[row.position : row.position + row.num_new]
        return Row(ids, row.position, row.blocks, row.num_local_tokens(self.block_tokens), row.yields)

    def _breathing(self, attend: Attend) -> Attend:
        breathe = self.between_layers
        if breathe is None:
            return attend

        def attend_after(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            breathe()
            return attend(layer, q, k, v)

        return attend_after

    # ---- for others ----------------------------------------------------------------------------------------------------------
    def serve(self, rows: Sequence[ReadRow], tables: Sequence[Sequence[int]]) -> Serving:
        """Get ready for the queries of a read."""
        return Serving(self.kv_pool, [row.num_tokens for row in rows], tables)

    def answer(self, serving: Serving, peer: int, read: int, layer: int, patience: float = 1.0) -> bool:
        """Answer a reader's queries of one layer. False where the read has ended; raises TransportError where
        nothing comes for `patience` deadlines."""
        config = self.decoder.config
        query = Query(serving.num_tokens, config.num_heads, config.head_dim, self.kv_pool)
        self.receive(peer, tag_of(QUERY, read), query.message, patience)
        if query.has_ended:
            return False
        answer = serving.answer(layer, query.q, config.scale, self.backend)
        self.transport.send(peer, tag_of(ANSWER, read), answer)
        return True

    def send_blocks(self, peer: int, tag: int, blocks: Sequence[int]) -> None:
        self.transport.send(peer, tag, gather_blocks(self.kv_pool, self._ids(blocks), backend=self.backend))

    def receive_blocks(self, peer: int, tag: int, blocks: Sequence[int], patience: float = 1.0) -> None:
        """Raises TransportError where they do not come."""
        data = self.kv_pool.new_empty((len(blocks), *self.kv_pool.shape[1:]))
        self.receive(peer, tag, data, patience)
        scatter_blocks(self.kv_pool, self._ids(blocks), data, backend=self.backend)

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int32, device=self.kv_pool.device)

    def receive(self, peer: int, tag: int, buffer: torch.Tensor, patience: float = 1.0) -> None:
        """Raises TransportError where nothing comes for `patience` deadlines."""
        handle = self.transport.post_recv(peer, tag, buffer)
        self.transport.wait(handle, time.monotonic() + patience * self.deadline_s)
