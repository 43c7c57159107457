"""What messages cost between two processes of this machine: the transport beside bare gloo, alone and beside a running model.

The two take turns in rounds, so that whatever else the machine does meets them alike. A move is `num_bytes` one way and an
acknowledgement back; beside a model: an iteration of decode runs in a thread of each process all the while.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from threading import Event, Thread
from typing import Any

import torch
from torch.distributed import Store

from infreal.bench.partner import Partner, bare_group
from infreal.model import Decoder, Row, config_from_hf, make_batch, random_decoder
from infreal.model.loading import SMOLLM2_SHAPE
from infreal.transport.gloo import GlooTransport

PING_BYTES, MOVE_BYTES = 8 << 10, 16 << 20
PING_ROUNDS, PINGS = 20, 100  # of each in a round
MOVE_ROUNDS = 20
BLOCK_TOKENS, CONTEXT_TOKENS = 16, 1024
WAIT_S = 60.0
GO, BACK, BULK, BULK_BACK = 0, 1, 2, 5  # tags: an acknowledgement comes by the lane of queries
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Finding:
    case: str
    metric: str
    value: float

    def __str__(self) -> str:
        return f"{self.case:<32} {self.metric:<16} {self.value:.4g}"


@dataclass
class End:
    """One side of an exchange over either carrier: `go` messages from rank 0 to rank 1, `back` messages the other way."""

    go: torch.Tensor
    back: torch.Tensor
    start_recv: Callable[[int, torch.Tensor], Callable[[], object]]
    send: Callable[[int, torch.Tensor], object]
    tags: tuple[int, int]

    def lead(self) -> None:
        wait = self.start_recv(self.tags[1], self.back)
        self.send(self.tags[0], self.go)
        wait()

    def follow(self) -> None:
        self.start_recv(self.tags[0], self.go)()
        self.send(self.tags[1], self.back)


def over_gloo(group: Any, rank: int, go: torch.Tensor, back: torch.Tensor, tags: tuple[int, int]) -> End:
    """Sent buffers never change here, so nothing is copied, and nothing waited for but what comes."""
    works: list[Any] = []

    def send(tag: int, message: torch.Tensor) -> None:
        works.append(group.send([message], 1 - rank, tag))
        del works[:-4]

    return End(go, back, lambda tag, buffer: group.recv([buffer], 1 - rank, tag).wait, send, tags)


def over_transport(transport: GlooTransport, go: torch.Tensor, back: torch.Tensor, tags: tuple[int, int]) -> End:
    peer = 1 - transport.rank

    def start_recv(tag: int, buffer: torch.Tensor) -> Callable[[], object]:
        handle = transport.post_recv(peer, tag, buffer)
        return lambda: transport.wait(handle, time.monotonic() + WAIT_S)

    return End(go, back, start_recv, lambda tag, message: transport.send(peer, tag, message), tags)


def take_turns(ends: dict[str, End], rank: int, rounds: int, repeats: int) -> Times:
    times: Times = {name: [] for name in ends}
    for _ in range(rounds):
        for name, end in ends.items():
            for _ in range(repeats):
                start_s = time.perf_counter()
                end.lead() if rank == 0 else end.follow()
                times[name].append(time.perf_counter() - start_s)
    return times


def pings(transport: GlooTransport, store: Store, num_bytes: int, rounds: int) -> Times:
    """Both sides call it."""
    rank, message = transport.rank, torch.zeros(num_bytes // 4)
    group = bare_group(store, rank, f"pings/{num_bytes}")
    ends = {
        "gloo": over_gloo(group, rank, message, message.clone(), (GO, BACK)),
        "transport": over_transport(transport, message, message.clone(), (GO, BACK)),
    }
    take_turns(ends, rank, 1, PINGS)
    return take_turns(ends, rank, rounds, PINGS)


def moves(
    transport: GlooTransport, store: Store, num_bytes: int, rounds: int, beside: bool
) -> tuple[Times, list[float]]:
    """Both sides call it. Also the times of the iterations that ran beside."""
    rank, message, note = transport.rank, torch.zeros(num_bytes // 4), torch.zeros(1)
    group = bare_group(store, rank, f"moves/{num_bytes}/{beside}")
    ends = {
        "gloo": over_gloo(group, rank, message, note, (BULK, BULK_BACK)),
        "transport": over_transport(transport, message, note, (BULK, BULK_BACK)),
    }
    take_turns(ends, rank, 1, 1)
    if not beside:
        return take_turns(ends, rank, rounds, 1), []
    with Iterating() as iterating:
        times = take_turns(ends, rank, rounds, 1)
    return times, iterating.times_s


@dataclass
class Iterating:
    """Decode iterations of one row of a model of SmolLM2's shape, in a thread, while the context lasts."""

    times_s: list[float] = field(default_factory=list)

    def __enter__(self) -> "Iterating":
        iterate, self._ended = decode_iteration(), Event()
        iterate()
        self._thread = Thread(target=self._run, args=(iterate,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self, iterate: Callable[[], object]) -> None:
        while not self._ended.is_set():
            start_s = time.perf_counter()
            iterate()
            self.times_s.append(time.perf_counter() - start_s)


def decode_iteration() -> Callable[[], torch.Tensor]:
    decoder: Decoder = random_decoder(config_from_hf(SMOLLM2_SHAPE, "bench"), 0, torch.float32)
    blocks = range(CONTEXT_TOKENS // BLOCK_TOKENS)
    pool = decoder.new_pool(len(blocks), BLOCK_TOKENS).normal_()
    batch = make_batch([Row([1], CONTEXT_TOKENS - 1, blocks)], BLOCK_TOKENS)
    return lambda: decoder.forward(batch, decoder.local_attention(batch, pool, "torch"))


def measure_exchange(rounds: int = PING_ROUNDS, move_rounds: int = MOVE_ROUNDS) -> Iterator[Finding]:
    with Partner() as partner:
        both = partner.transport, partner.store
        partner.start(pings, PING_BYTES, rounds)
        yield from _latencies(pings(*both, PING_BYTES, rounds))
        partner.result()
        with Iterating() as alone:
            time.sleep(1.0)
        yield Finding("decode iteration/alone", "p50_ms", median(alone.times_s) * 1e3)
        for beside, name in ((False, "alone"), (True, "beside a model")):
            partner.start(moves, MOVE_BYTES, move_rounds, beside)
            times, iterations = moves(*both, MOVE_BYTES, move_rounds, beside)
            _, theirs = partner.result()
            yield from _bandwidths(times, name)
            if beside:
                yield Finding("decode iteration/sending beside", "p50_ms", median(iterations) * 1e3)
                yield Finding("decode iteration/receiving beside", "p50_ms", median(theirs) * 1e3)


def _latencies(times: Times) -> Iterator[Finding]:
    for name, values in times.items():
        yield Finding(f"8 KB there and back/{name}", "p50_us", median(values) * 1e6)
        yield Finding(f"8 KB there and back/{name}", "p99_us", quantiles(values, n=100)[98] * 1e6)


def _bandwidths(times: Times, beside: str) -> Iterator[Finding]:
    for name, values in times.items():
        yield Finding(f"16 MB move/{name}, {beside}", "gb_per_s", MOVE_BYTES / median(values) / 1e9)


def write_findings(findings: Sequence[Finding], file: Any) -> None:
    import csv

    writer = csv.writer(file)
    writer.writerow(("case", "metric", "value"))
    writer.writerows((f.case, f.metric, f.value) for f in findings)
