"""Points of the ranks of one instance: what a sum over them takes, by its size; and one rank measured without the others."""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context

import torch
from torch.distributed import TCPStore

from infreal.bench.partner import use_core
from infreal.profiling.pair import LINK
from infreal.profiling.table import Table
from infreal.transport.connecting import serve_store
from infreal.transport.group import join_group

REDUCED_BYTES = tuple(1 << exponent for exponent in range(10, 25, 2))
ROUNDS, WARM_ROUNDS = 30, 5
HOST, START_S = "127.0.0.1", 120.0


@dataclass(frozen=True, slots=True)
class Unheard:
    """Rank 0 of a group whose other ranks are not there: what is computed is wrong, what it takes is right but for the sums."""

    size: int
    rank: int = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.size, *x.shape)


def measure_all_reduce(table: Table, ranks: int) -> None:
    """Over gloo by as many processes of this machine, each on a core of its own where there are enough; rank 0's wall times."""
    common = replace(table.common, operator="all_reduce", ranks=ranks, link=LINK)
    rows = [replace(common, num_bytes=num_bytes) for num_bytes in REDUCED_BYTES]
    if all(table.has(operator=row.operator, num_bytes=row.num_bytes, ranks=ranks, link=LINK) for row in rows):
        return
    store = serve_store(HOST, timedelta(seconds=START_S))
    with ProcessPoolExecutor(ranks, get_context("spawn")) as processes:
        works = [processes.submit(reduce_times, rank, ranks, store.port) for rank in range(ranks)]
        times_s = [work.result() for work in works]
    for row, own_times_s in zip(rows, times_s[0], strict=True):
        table.add(row, own_times_s)


def reduce_times(rank: int, ranks: int, port: int) -> list[list[float]]:
    """Seconds of each all-reduce, by size. All ranks call it."""
    use_core(rank)
    store = TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=START_S))
    group = join_group(store, rank, ranks, START_S, host=HOST)
    times_s = []
    for num_bytes in REDUCED_BYTES:
        message, taken_s = torch.zeros(num_bytes // 4), []
        for _ in range(WARM_ROUNDS + ROUNDS):
            start_s = time.perf_counter()
            group.all_reduce(message)
            taken_s.append(time.perf_counter() - start_s)
        times_s.append(taken_s[WARM_ROUNDS:])
    return times_s
