"""Points of one process: layers, head, attention, the host's part of an iteration, serving others beside one's own iterations."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt
from threading import Event, Thread

import torch

from infreal.dist_attention import DistAttention, RemotePart, Serving
from infreal.model import Batch, Decoder, Row, make_batch
from infreal.profiling.table import Table, Took, clock

BLOCK_TOKENS = 16
LAYER_TOKENS, HEAD_ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512), (1, 2, 4, 8, 16, 32, 64)
MOST_LAYER_POINTS, FLAT = 18, 0.05  # linear between points to within 5 %
DECODE_ROWS, SHORTEST_TOKENS, LONGEST_TOKENS = (1, 2, 4, 8, 16, 32), 64, 4096
CHUNKS, PREFIXES = (16, 64, 128, 256, 512), (0, 256, 1024, 3584)
HOST_ROWS = (1, 8, 32)
SERVED = ((1, 1024), (8, 512))  # rows, context of each
OWN = (4, 512)  # the instance's iterations beside
BESIDE_S = 1.5


class AnswersAtOnce:
    """A transport whose peers' answers are there as soon as they are waited for."""

    def post_recv(self, peer: int, tag: int, buffer: torch.Tensor) -> object:
        return buffer.fill_(1.0)

    def send(self, peer: int, tag: int, tensor: torch.Tensor) -> None: ...
    def wait(self, handle: object, end_s: float) -> None: ...


@dataclass
class Subject:
    """A model on this machine with a pool of `pool_tokens` tokens."""

    decoder: Decoder
    backend: str
    pool_tokens: int

    def __post_init__(self) -> None:
        self.pool = self.decoder.new_pool(self.pool_tokens // BLOCK_TOKENS, BLOCK_TOKENS).normal_()

    @property
    def layers(self) -> int:
        return self.decoder.config.num_layers

    def batch(self, lengths: Sequence[tuple[int, int]], wants_logits: bool = True) -> Batch:
        """lengths: (new tokens, context with them) of each row; rows share no block."""
        return make_batch(self.rows(lengths, wants_logits), BLOCK_TOKENS, self.decoder.device)

    def rows(self, lengths: Sequence[tuple[int, int]], wants_logits: bool = True) -> list[Row]:
        rows, first = [], 0
        for new, context in lengths:
            count = -(-context // BLOCK_TOKENS)
            rows.append(Row([1] * new, context - new, range(first, first + count), None, wants_logits))
            first += count
        return rows

    def attention(self, lengths: Sequence[tuple[int, int]]) -> Callable[[], object]:
        """Writing K and V and attending, in all layers: within a forward pass where the clock allows, else alone."""
        if self.reads_clock_in_place:
            forward = self._forward(self.batch(lengths))
            return lambda: Took(forward()[0])
        return self._attention_alone(lengths)

    def without_attention(self, tokens: int) -> Callable[[], object]:
        """A forward pass, its attention left out: beside it where the clock allows, else none is computed."""
        batch = self.batch([(tokens, tokens)], wants_logits=False)
        if self.reads_clock_in_place:
            forward = self._forward(batch)
            return lambda: Took(forward()[1])
        return lambda: self.decoder.forward(batch, lambda layer, q, k, v: q)

    @property
    def reads_clock_in_place(self) -> bool:
        """On a CPU: what runs in between takes each part's data and code out of the caches. A GPU would have to be waited for."""
        return self.device_type == "cpu"

    def _forward(self, batch: Batch) -> Callable[[], tuple[float, float]]:
        """A forward pass that tells the seconds of its attention, and of the rest."""
        now_s, _ = clock("cpu")

        @torch.inference_mode()
        def forward() -> tuple[float, float]:
            local, attention_s = self.decoder.local_attention(batch, self.pool, self.backend), 0.0

            def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                nonlocal attention_s
                start_s = now_s()
                attended = local(layer, q, k, v)
                attention_s += now_s() - start_s
                return attended

            start_s = now_s()
            self.decoder.forward(batch, attend)
            return attention_s, now_s() - start_s - attention_s

        return forward

    def exchange(self, rows: int, context: int) -> Callable[[], Took]:
        """What a layer's attention takes longer where a peer computes a part, its answer and the wire apart: queries sent, partial
        states merged. Every other layer of a forward pass has such a peer, which answers at once."""
        batch, (now_s, _) = self.batch([(1, context)] * rows), clock(self.device_type)

        @torch.inference_mode()
        def forward() -> Took:
            local = self.decoder.local_attention(batch, self.pool, self.backend)
            index = torch.arange(rows, device=self.decoder.device)
            dist = DistAttention(local, [RemotePart(1, 0, index)], AnswersAtOnce(), time.monotonic, 1.0)
            times_s: tuple[list[float], list[float]] = ([], [])

            def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                start_s = now_s()
                attended = (dist if layer % 2 else local)(layer, q, k, v)
                times_s[layer % 2].append(now_s() - start_s)
                return attended

            self.decoder.forward(batch, attend)
            alone_s, shared_s = (statistics.median(times) for times in times_s)
            return Took(max(0.0, shared_s - alone_s))

        return forward

    @property
    def device_type(self) -> str:
        return self.decoder.device.type

    def _attention_alone(self, lengths: Sequence[tuple[int, int]]) -> Callable[[], None]:
        batch, config = self.batch(lengths), self.decoder.config
        shape = (batch.num_tokens, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        qkv = torch.randn(shape, device=self.decoder.device).to(self.decoder.dtype)
        q, k, v = qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()

        @torch.inference_mode()
        def attend() -> None:
            local = self.decoder.local_attention(batch, self.pool, self.backend)
            for layer in range(self.layers):
                local(layer, q, k, v)

        return attend

    def head(self, rows: int) -> Callable[[], object]:
        """Behind a forward pass where the clock allows: alone, its weights would stay in a cache."""
        x = torch.randn(rows, self.decoder.config.hidden_size, device=self.decoder.device).to(self.decoder.dtype)
        if not self.reads_clock_in_place:
            return lambda: self.decoder.logits(x).argmax(-1)
        layers, (now_s, _) = self._forward(self.batch([(1, 1)], wants_logits=False)), clock("cpu")

        @torch.inference_mode()
        def head() -> Took:
            layers()
            start_s = now_s()
            self.decoder.logits(x).argmax(-1)
            return Took(now_s() - start_s)

        return head

    def host(self, rows: int) -> Callable[[], object]:
        """What an iteration does beside the forward pass: its batch made, tokens read back and taken down."""
        lengths, tokens = (
            [(1, SHORTEST_TOKENS)] * rows,
            torch.zeros(rows, dtype=torch.int64, device=self.decoder.device),
        )
        texts: list[list[int]] = [[] for _ in range(rows)]

        def iterate() -> None:
            self.batch(lengths)
            for text, token in zip(texts, tokens.tolist(), strict=True):
                text.append(token)

        return iterate

    def iteration(self, lengths: Sequence[tuple[int, int]]) -> Callable[[], object]:
        """A whole iteration, as an instance computes it."""

        def iterate() -> object:
            batch = self.batch(lengths)
            return (
                self.decoder.forward(batch, self.decoder.local_attention(batch, self.pool, self.backend))
                .argmax(-1)
                .tolist()
            )

        return iterate

    def serving(self, rows: int, context: int) -> Callable[[], None]:
        """MicroAttention for `rows` rows of others, in all layers; over blocks behind those of the instance's own iterations."""
        config, count = self.decoder.config, context // BLOCK_TOKENS
        first = self.pool.shape[0] - rows * count
        tables = [range(first + i * count, first + (i + 1) * count) for i in range(rows)]
        served = Serving(self.pool, [1] * rows, tables)
        q = torch.randn(rows, config.num_heads, config.head_dim, device=self.decoder.device).to(self.decoder.dtype)

        @torch.inference_mode()
        def serve() -> None:
            for layer in range(self.layers):
                served.answer(layer, q, config.scale, self.backend)

        return serve


def measure_model(table: Table, subject: Subject) -> None:
    layers = subject.layers
    measure_layers(table, subject)
    for rows in HEAD_ROWS:
        table.measure(lambda rows=rows: subject.head(rows), operator="head", rows=rows)
    for rows in HOST_ROWS:
        table.measure(lambda rows=rows: subject.host(rows), operator="host", rows=rows)
    for rows in DECODE_ROWS:
        for context in contexts(min(LONGEST_TOKENS, subject.pool_tokens // rows)):
            lengths = [(1, context)] * rows
            point = {"operator": "decode_attention", "rows": rows, "tokens": 1, "context_tokens": context}
            table.measure(lambda lengths=lengths: subject.attention(lengths), layers, **point)
    for tokens in CHUNKS:
        for prefix in PREFIXES:
            if tokens + prefix <= subject.pool_tokens:
                point = {
                    "operator": "prefill_attention",
                    "rows": 1,
                    "tokens": tokens,
                    "context_tokens": tokens + prefix,
                }
                lengths = [(tokens, tokens + prefix)]
                table.measure(lambda lengths=lengths: subject.attention(lengths), layers, **point)
    if subject.reads_clock_in_place and layers > 1:
        context = min(OWN[1], subject.pool_tokens // 2 // OWN[0])
        point = {"operator": "exchange_overhead", "rows": OWN[0], "context_tokens": context}
        table.measure(lambda: subject.exchange(OWN[0], context), **point)
    for rows, context in SERVED:
        measure_serving(table, subject, rows, min(context, subject.pool_tokens // 2 // rows))


def measure_layers(table: Table, subject: Subject) -> None:
    """Halves an interval where its middle is not what a line between its ends says."""

    def layer_s(tokens: int) -> float:
        return table.measure(lambda: subject.without_attention(tokens), subject.layers, operator="layer", tokens=tokens)

    known = {tokens: layer_s(tokens) for tokens in LAYER_TOKENS}
    open_intervals = list(pairwise(LAYER_TOKENS))
    while open_intervals and len(known) < MOST_LAYER_POINTS:
        low, high = open_intervals.pop(0)
        middle = isqrt(low * high)
        if middle in known or high - low < 2:
            continue
        known[middle] = layer_s(middle)
        straight_s = known[low] + (known[high] - known[low]) * (middle - low) / (high - low)
        if abs(straight_s / known[middle] - 1) > FLAT:
            open_intervals += [(low, middle), (middle, high)]


def contexts(longest: int) -> list[int]:
    """Four, from the shortest to the longest, in equal ratios and whole blocks."""
    ratio = (longest / SHORTEST_TOKENS) ** (1 / 3)
    return sorted({int(SHORTEST_TOKENS * ratio**i + 0.5) // BLOCK_TOKENS * BLOCK_TOKENS for i in range(4)})


def measure_serving(table: Table, subject: Subject, rows: int, context: int) -> None:
    """Serving and iterating, each alone and both at once: how much they slow one another down. Times are of a whole call."""
    point = {"rows": rows, "context_tokens": context}
    if table.has(operator="iteration_beside_serving", **point):
        return
    own_rows, own_context = OWN[0], min(OWN[1], subject.pool_tokens // 2 // OWN[0])
    serve, iterate = subject.serving(rows, context), subject.iteration([(1, own_context)] * own_rows)
    table.measure(lambda: serve, operator="serving", **point)
    table.measure(lambda: iterate, operator="iteration", rows=own_rows, context_tokens=own_context)
    ended = Event()
    own_s: list[float] = []
    thread = Thread(target=_repeat_until, args=(iterate, ended, own_s), daemon=True)
    thread.start()
    served_s: list[float] = []
    end_s = time.perf_counter() + BESIDE_S
    while time.perf_counter() < end_s or len(served_s) < 3:
        served_s.append(_timed(serve))
    ended.set()
    thread.join()
    table.add(replace(table.common, operator="serving_beside_iteration", **point), served_s)
    table.add(replace(table.common, operator="iteration_beside_serving", **point), own_s)


def _repeat_until(call: Callable[[], object], ended: Event, times_s: list[float]) -> None:
    while not ended.is_set():
        times_s.append(_timed(call))


def _timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s
