"""What several ranks cost an instance: the fan-out of an order, and what each rank waits for in an iteration.

Two ranks in two processes, a core each, with the code of the actors but no machine: rank 0 orders what a step of decode rows needs.
All times are of one clock. A collective's own time counts from when the last rank has come to it; before, the others wait for it.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, Store

from infreal.actors.channel import Channel
from infreal.actors.follower import Follower
from infreal.actors.orders import Accept, BeginStep, Done, EndStep, Iterate, Order
from infreal.actors.ranks import Ranks
from infreal.bench.partner import Partner
from infreal.executor import Executor
from infreal.layout import StepRow
from infreal.model import config_from_hf, random_decoder
from infreal.model.loading import SMOLLM2_SHAPE
from infreal.requests import RandomPrompts, Requests
from infreal.transport.gloo import GlooTransport
from infreal.transport.group import Group, join_group
from infreal.transport.in_process import InProcessNetwork
from perfmodel.cluster import Workload
from perfmodel.messages import IterationsDone

SHAPE = SMOLLM2_SHAPE | {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}  # two ranks divide it
SIZE, BLOCK_TOKENS, TIMEOUT_S = 2, 16, 60.0
ROUNDS = 500
Span = tuple[str, float, float]  # what, from when to when


@dataclass
class Traced:
    """A group whose collectives leave spans."""

    group: Group
    spans: list[Span]

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._noting("all_reduce", self.group.all_reduce, x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._noting("all_gather", self.group.all_gather, x)

    def _noting(self, what: str, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        start_s = time.monotonic()
        out = call(x)
        self.spans.append((what, start_s, time.monotonic()))
        return out


@dataclass(slots=True)
class TracedExecutor(Executor):
    spans: list[Span] = field(default_factory=list)

    def proceed(self, added: Any) -> IterationsDone:
        start_s = time.monotonic()
        done = Executor.proceed(self, added)
        self.spans.append(("iteration", start_s, time.monotonic()))
        return done


@dataclass(frozen=True)
class Case:
    """rows of decode, with `context_tokens` of KV each, for so many iterations."""

    rows: int = 8
    context_tokens: int = 512
    iterations: int = 100

    @property
    def row_blocks(self) -> int:
        return -(-(self.context_tokens + self.iterations) // BLOCK_TOKENS)

    def requests(self) -> Requests:
        lengths = np.full(self.rows, self.context_tokens), np.full(self.rows, self.iterations + 1)
        workload = Workload(np.zeros(self.rows), *lengths)
        return Requests(workload, RandomPrompts(workload, SHAPE["vocab_size"], 0))

    def executor(self, rank: int, store: Store) -> TracedExecutor:
        spans: list[Span] = []
        group = Traced(join_group(PrefixStore("group", store), rank, SIZE, TIMEOUT_S, host="127.0.0.1"), spans)
        decoder = random_decoder(config_from_hf(SHAPE, "bench"), 0, torch.float32, "cpu", group)
        pool = decoder.new_pool(self.rows * self.row_blocks, BLOCK_TOKENS).normal_()
        nobody = InProcessNetwork(1).endpoints[0]
        return TracedExecutor(decoder, pool, "torch", nobody, time.monotonic, TIMEOUT_S, spans=spans)

    def step(self) -> BeginStep:
        rows = [
            StepRow(i, self.context_tokens - 1, 1, True, list(range(i * self.row_blocks, (i + 1) * self.row_blocks)), 0)
            for i in range(self.rows)
        ]
        return BeginStep(1, self.iterations, rows, {}, (), {})


# ---- orders --------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class OrderCost:
    """send_s: until rank 0 goes on · there_s: until the other rank has it, half of there and back; medians, and there_p99_s."""

    what: str
    send_s: float
    there_s: float
    there_p99_s: float


def measure_orders(partner: Partner) -> Iterator[OrderCost]:
    big = Case(rows=64, context_tokens=2048)
    orders: dict[str, Order] = {
        "an iteration of 64 rows": Iterate([[] for _ in range(big.rows)]),
        f"a step of 64 rows, {big.row_blocks} blocks each": big.step(),
    }
    partner.start(echo, len(orders) * ROUNDS)
    channel = Channel(GlooTransport(0, SIZE, PrefixStore("echo", partner.store)))
    for what, order in orders.items():
        sends, backs = [], []
        for _ in range(ROUNDS):
            start_s = time.perf_counter()
            channel.send([1], order)
            sends.append(time.perf_counter() - start_s)
            channel.receive(1, TIMEOUT_S)
            backs.append((time.perf_counter() - start_s) / 2)
        yield OrderCost(what, median(sends), median(backs), quantiles(backs, n=100)[-1])
    partner.result()


def echo(transport: GlooTransport, store: Store, count: int) -> None:
    channel = Channel(GlooTransport(1, SIZE, PrefixStore("echo", store)))
    for _ in range(count):
        channel.receive(0, TIMEOUT_S)
        channel.send([0], Done(0))


# ---- iterations ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RankTimes:
    """Of an iteration of one rank, medians in seconds. collectives_s: their own time · waiting_s: in them, for the other rank ·
    between_s: from one iteration to the next."""

    rank: int
    iteration_s: float
    computing_s: float
    collectives_s: float
    waiting_s: float
    between_s: float


def trace_iterations(partner: Partner, case: Case) -> list[list[Span]]:
    """The spans of each rank."""
    partner.start(follow, case)
    executor = case.executor(0, partner.store)
    transport = GlooTransport(0, SIZE, PrefixStore("control", partner.store))
    ranks = Ranks(executor, case.requests(), spawn, print, Channel(transport), SIZE)
    for i in range(case.rows):
        ranks.order(Accept(i))
    ranks.order(case.step())
    for _ in range(case.iterations):
        order = Iterate([[] for _ in range(case.rows)])
        ranks.tell(order)
        ranks.own.iterate(order.added)
    ranks.order(EndStep())
    transport.close()
    return [executor.spans, partner.result()]


def follow(transport: GlooTransport, store: Store, case: Case) -> list[Span]:
    executor = case.executor(1, store)
    follower = Follower(executor, case.requests(), Channel(GlooTransport(1, SIZE, PrefixStore("control", store))))
    follower.start()
    follower.wait()
    return executor.spans


def spawn(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


def summarize(traces: list[list[Span]]) -> list[RankTimes]:
    last_comes = [
        max(starts) for starts in zip(*([s for w, s, _ in t if w != "iteration"] for t in traces), strict=True)
    ]
    return [times_of(rank, spans, last_comes) for rank, spans in enumerate(traces)]


def times_of(rank: int, spans: list[Span], last_comes: list[float]) -> RankTimes:
    """last_comes: when all ranks had come to each collective."""
    rows, own, waiting, number, before_s = [], 0.0, 0.0, 0, None
    for what, start_s, end_s in spans:
        if what != "iteration":
            waiting += last_comes[number] - start_s
            own += end_s - last_comes[number]
            number += 1
            continue
        took_s = end_s - start_s
        between_s = 0.0 if before_s is None else start_s - before_s
        rows.append((took_s, took_s - own - waiting, own, waiting, between_s))
        own, waiting, before_s = 0.0, 0.0, end_s
    return RankTimes(rank, *(median(column) for column in zip(*rows[len(rows) // 10 :], strict=True)))


def write_trace(traces: list[list[Span]], path: Path) -> None:
    """For Perfetto or chrome://tracing: a process a rank."""
    zero_s = min(spans[0][1] for spans in traces)
    events = [
        {"name": what, "ph": "X", "pid": rank, "tid": 0, "ts": 1e6 * (start_s - zero_s), "dur": 1e6 * (end_s - start_s)}
        for rank, spans in enumerate(traces)
        for what, start_s, end_s in spans
    ]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def report(orders: list[OrderCost], ranks: list[RankTimes]) -> str:
    lines = [f"{'order, in ms':<36} {'rank 0 goes on':>15} {'rank 1 has it':>15} {'p99':>8}"]
    for o in orders:
        lines.append(f"{o.what:<36} {1e3 * o.send_s:15.3f} {1e3 * o.there_s:15.3f} {1e3 * o.there_p99_s:8.3f}")
    lines += [
        "",
        f"{'rank, in ms':<12} {'iteration':>10} {'computing':>10} {'collectives':>12} {'waiting':>8} {'between':>8}",
    ]
    for r in ranks:
        times_s = (r.iteration_s, r.computing_s, r.collectives_s, r.waiting_s, r.between_s)
        cells = [f"{1e3 * s:{w}.2f}" for s, w in zip(times_s, (10, 10, 12, 8, 8), strict=True)]
        lines.append(f"{r.rank:<12} {' '.join(cells)}")
    return "\n".join(lines)


def measure_ranks(case: Case, trace: Path | None) -> str:
    with Partner() as partner:
        orders = list(measure_orders(partner))
        traces = trace_iterations(partner, case)
    if trace:
        write_trace(traces, trace)
    return report(orders, summarize(traces))
