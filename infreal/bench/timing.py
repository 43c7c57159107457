"""Times of calls: on a GPU triton's `do_bench` (which flushes the L2 cache before each call), on a CPU interleaved rounds."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

MIN_ROUNDS, MAX_ROUNDS = 3, 50
Key = TypeVar("Key")
ROUNDS_S = 1.5  # of all contenders together, once MIN_ROUNDS are done


@dataclass(frozen=True)
class Timing:
    median_s: float
    std_s: float
    repeats: int

    @classmethod
    def of(cls, times_s: list[float]) -> "Timing":
        return cls(statistics.median(times_s), statistics.stdev(times_s) if len(times_s) > 1 else 0.0, len(times_s))


def measure(calls: Mapping[Key, Callable[[], object]], device: str) -> dict[Key, Timing]:
    """Median, deviation and count for every call, after one call of each to warm up."""
    if device == "cuda":
        return {name: _on_gpu(call) for name, call in calls.items()}
    return _interleaved(calls)


def _on_gpu(call: Callable[[], object]) -> Timing:
    from triton.testing import do_bench

    return Timing.of([time_ms / 1e3 for time_ms in do_bench(call, warmup=10, rep=50, return_mode="all")])


def _interleaved(calls: Mapping[Key, Callable[[], object]]) -> dict[Key, Timing]:
    """Round after round over all calls, so that whatever else the machine does meets them alike: ratios hold."""
    for call in calls.values():
        call()
    times_s: dict[Key, list[float]] = {name: [] for name in calls}
    end_s = time.perf_counter() + ROUNDS_S
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.perf_counter() > end_s:
            break
        for name, call in calls.items():
            start_s = time.perf_counter()
            call()
            times_s[name].append(time.perf_counter() - start_s)
    return {name: Timing.of(times) for name, times in times_s.items()}
