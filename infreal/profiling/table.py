"""The profile as it grows: a point that is in the file already is not measured again."""

import csv
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch

from infreal.bench.profile import COLUMNS, ProfileRow, write_profile

KEY = ("operator", "rows", "tokens", "context_tokens", "num_bytes", "ranks", "link")
SAME = ("gpu", "software", "dtype", "heads", "kv_heads", "head_dim", "n", "k")  # in all rows of a file
LEAST_REPEATS, MOST_REPEATS, ENOUGH_S = 3, 15, 0.6
Point = tuple[object, ...]


class MismatchError(Exception):
    """The file holds the profile of another machine or model."""


class Took(float):
    """Seconds that a call measured of itself, of a part of what it did."""


@dataclass
class Table:
    """common: what all rows say. tell(row) is called after each new one."""

    path: Path
    common: ProfileRow
    tell: Callable[[ProfileRow], None] = lambda row: None
    rows: dict[Point, ProfileRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        for row in read_rows(self.path):
            for name in SAME:
                if getattr(row, name) != getattr(self.common, name):
                    found, expected = getattr(row, name), getattr(self.common, name)
                    raise MismatchError(f"{self.path}: {name} is {found!r}, here it is {expected!r}")
            self.rows[point_of(row)] = row

    def measure(self, make_call: Callable[[], Callable[[], object]], parts: int = 1, **point: object) -> float:
        """Seconds of one of the `parts` of a call: the median of several, after one to warm up. make_call: only if needed."""
        row = replace(self.common, **point)
        if point_of(row) not in self.rows:
            self.add(row, [seconds / parts for seconds in repeat(make_call(), self.common.gpu)])
        found = self.rows[point_of(row)].time_s
        assert found is not None
        return found

    def has(self, **point: object) -> bool:
        return point_of(replace(self.common, **point)) in self.rows

    def add(self, row: ProfileRow, times_s: list[float]) -> None:
        spread = statistics.stdev(times_s) if len(times_s) > 1 else 0.0
        row = replace(row, time_s=statistics.median(times_s), time_s_std=spread, repeats=len(times_s))
        self.rows[point_of(row)] = row
        write_profile(self.path, list(self.rows.values()))
        self.tell(row)


def repeat(call: Callable[[], object], gpu: str) -> list[float]:
    """Seconds of each call, or those that it says it `Took`."""
    now_s, sync = clock(gpu)
    call()
    sync()
    times_s: list[float] = []
    while len(times_s) < LEAST_REPEATS or (sum(times_s) < ENOUGH_S and len(times_s) < MOST_REPEATS):
        start_s = now_s()
        answer = call()
        sync()
        times_s.append(float(answer) if isinstance(answer, Took) else now_s() - start_s)
    return times_s


def clock(gpu: str) -> tuple[Callable[[], float], Callable[[], None]]:
    """Of calls in this thread alone. One thread on a CPU: its own time, so that nobody else's work on the machine counts."""
    if not gpu.startswith("cpu"):
        return time.perf_counter, torch.cuda.synchronize
    return (time.thread_time if torch.get_num_threads() == 1 else time.perf_counter), lambda: None


def point_of(row: ProfileRow) -> Point:
    return tuple(getattr(row, name) for name in KEY)


def read_rows(path: Path) -> list[ProfileRow]:
    """A file that `write_profile` wrote. Raises MismatchError for another."""
    kinds = {f.name: f.type for f in fields(ProfileRow)}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise MismatchError(f"{path}: not a profile (columns {', '.join(reader.fieldnames or ('none',))})")
        return [_row(line, kinds, f"{path}: line {reader.line_num}") for line in reader]


def _row(line: dict[str, str], kinds: dict[str, object], where: str) -> ProfileRow:
    try:
        return ProfileRow(**{name: _value(text, kinds[name]) for name, text in line.items()})
    except (ValueError, TypeError) as error:
        raise MismatchError(f"{where}: {error}") from None


def _value(text: str, kind: object) -> str | int | float | None:
    if text == "":
        return None
    convert = {"str": str, "int": int, "float": float}[getattr(kind, "__name__", str(kind)).partition(" ")[0]]
    return convert(text)
