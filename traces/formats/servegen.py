"""ServeGen (alibaba/ServeGen): a folder of clients, from which requests are drawn.

`chunk-K-trace.csv`, no header: `t0, rate, cv, pattern, shape, scale`, one line per window of gaps (600 s); `pattern` is
Gamma, Weibull or empty (idle). `chunk-K-dataset.json`: start second → `{"input_tokens", "output_tokens"}`, each a string
that spells a Python dict of length → share; a window takes the latest one that is not empty.

A window offers round(rate × length) requests, which is the count the file was fitted to: gaps of the client's shape are drawn
and stretched to fill it. The fitted scale is not used, since for bursty windows it contradicts the rate. Input and output are
drawn independently, as the file has only their marginals; clients have streams of their own.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import InputError
from traces.chunk import MAX_TOKENS, Chunk
from traces.files import TraceFile
from traces.options import LoadOptions
from traces.seeds import stream
from traces.trace import Account, Floats, Ints

LAST_WINDOW_S = 600.0
MAX_REQUESTS = 100_000_000
PATTERNS = ("Gamma", "Weibull")


@dataclass(frozen=True)
class Window:
    """One stretch of a client's day with a constant rate."""

    begin_s: float
    length_s: float
    num_requests: int
    pattern: str
    shape: float

    def arrivals(self, rng: np.random.Generator) -> Floats:
        """`num_requests` times in it: gaps of the pattern, stretched so that one more gap would reach its end."""
        draw = rng.standard_gamma if self.pattern == "Gamma" else rng.weibull
        gaps = draw(self.shape, self.num_requests + 1)
        total = gaps.sum()
        share = np.cumsum(gaps[:-1]) / total if total > 0 else np.zeros(self.num_requests)
        return self.begin_s + np.minimum(share, np.nextafter(1.0, 0.0)) * self.length_s


@dataclass(frozen=True)
class Lengths:
    """A distribution over whole numbers of tokens."""

    tokens: Ints
    cumulative: Floats

    def draw(self, uniform: Floats) -> Ints:
        index = np.searchsorted(self.cumulative, uniform * self.cumulative[-1], side="right")
        drawn: Ints = self.tokens[np.minimum(index, len(self.tokens) - 1)]
        return drawn


@dataclass(frozen=True)
class Client:
    """One client: its windows and, by start second, its length distributions (input, output)."""

    number: int
    where: str
    windows: list[Window]
    lengths: list[tuple[float, Lengths, Lengths]]

    def lengths_at(self, begin_s: float) -> tuple[Lengths, Lengths]:
        fitting = [pair for start_s, *pair in self.lengths if start_s <= begin_s]
        if not fitting:
            raise InputError(f"{self.where}: requests at {begin_s:g} s but no length distribution up to then")
        return fitting[-1][0], fitting[-1][1]


def read_folder(path: Path, options: LoadOptions, source: dict[str, Any], account: Account) -> Iterator[Chunk]:
    """All requests of the day in order of arrival, in seconds from its beginning; the session is the client's number."""
    clients = read_clients(path, source)
    account.notes.append(f"drawn from {len(clients)} ServeGen clients, seed {options.seed}")
    drawn = [part for client in clients for part in draw_client(client, options.seed)]
    if drawn:
        time, inputs, outputs, session = (np.concatenate(column) for column in zip(*drawn, strict=True))
        order = np.argsort(time, kind="stable")
        yield Chunk(time[order], inputs[order], outputs[order], {"session": session[order]})


def draw_client(client: Client, seed: int) -> Iterator[tuple[Floats, Ints, Ints, Ints]]:
    """Times, input tokens, output tokens and client number of the requests of each window."""
    rng = stream(seed, "client", client.number)
    for window in client.windows:
        inputs, outputs = client.lengths_at(window.begin_s)
        time = window.arrivals(rng)
        uniforms = rng.random((2, window.num_requests))
        session = np.full(window.num_requests, client.number, dtype=np.int64)
        yield time, inputs.draw(uniforms[0]), outputs.draw(uniforms[1]), session


def read_clients(path: Path, source: dict[str, Any]) -> list[Client]:
    """Every client of the folder; `source` gets the hash over all files."""
    if not path.is_dir():
        raise InputError(f"{path}: format servegen needs a folder with chunk-*-trace.csv")
    found = (re.fullmatch(r"chunk-(\d{1,9})-trace\.csv", file.name) for file in path.iterdir())
    numbers = sorted({int(match[1]) for match in found if match})
    if not numbers:
        raise InputError(f"{path}: no file chunk-*-trace.csv")
    digest = hashlib.sha256()
    clients = [_read_client(path, number, digest) for number in numbers]
    source["sha256"] = digest.hexdigest()
    num_requests = sum(window.num_requests for client in clients for window in client.windows)
    if num_requests > MAX_REQUESTS:
        raise InputError(f"{path}: the rates ask for {num_requests:,} requests, at most {MAX_REQUESTS:,} are drawn")
    return clients


def _read_client(path: Path, number: int, digest: Any) -> Client:
    dataset = TraceFile(path / f"chunk-{number}-dataset.json")
    trace = TraceFile(path / f"chunk-{number}-trace.csv")
    windows, lengths = _read_windows(trace), _read_lengths(dataset)
    for file in (trace, dataset):
        digest.update(f"{file.path.name} {file.sha256}\n".encode())
    return Client(number, str(dataset.path), windows, lengths)


def _read_windows(file: TraceFile) -> list[Window]:
    rows = []
    for first_line, data in file.blocks():
        for line, text in enumerate(data.decode("utf-8").split("\n"), first_line):
            if text.strip():
                rows.append(_window_row(file.where(line), text))
    if not rows:
        raise InputError(f"{file.path}: is empty")
    starts = [row[0] for row in rows]
    if sorted(set(starts)) != starts:
        raise InputError(f"{file.path}: window starts do not ascend")
    lengths_s = [*np.diff(starts).tolist(), LAST_WINDOW_S]
    return [
        Window(begin_s, length_s, round(rate * length_s), pattern, shape)
        for (begin_s, rate, pattern, shape), length_s in zip(rows, lengths_s, strict=True)
        if round(rate * length_s) > 0
    ]


def _window_row(where: str, text: str) -> tuple[float, float, str, float]:
    fields = [field.strip() for field in text.split(",")]
    if len(fields) != 6:
        raise InputError(f"{where}: {len(fields)} fields, t0,rate,cv,pattern,shape,scale are needed")
    numbers = []
    for name, value in zip(("t0", "rate", "shape"), (fields[0], fields[1], fields[4]), strict=True):
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0.0 <= number <= 1e9:
            raise InputError(f"{where}, column {name}: {value[:60]!r} is not a number from 0 to 1e9")
        numbers.append(number)
    begin_s, rate, shape = numbers
    if rate > 0 and (fields[3] not in PATTERNS or shape == 0):
        raise InputError(
            f"{where}, column pattern: {fields[3][:60]!r} with shape {shape:g} is not one of {', '.join(PATTERNS)}"
        )
    return begin_s, rate, fields[3], shape


def _read_lengths(file: TraceFile) -> list[tuple[float, Lengths, Lengths]]:
    try:
        tables = json.loads(b"".join(file.pieces()))
        pairs = [
            (float(key), _lengths(value["input_tokens"]), _lengths(value["output_tokens"]))
            for key, value in tables.items()
        ]
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ) as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise InputError(f"{file.path}: not ServeGen length tables ({reason})") from None
    return sorted(((start, a, b) for start, a, b in pairs if a is not None and b is not None), key=lambda pair: pair[0])


def _lengths(text: str) -> Lengths | None:
    """The distribution that a string spells; None for `{}`."""
    shares = ast.literal_eval(text)
    if not shares:
        return None
    weights = np.array(list(shares.values()), dtype=np.float64)
    if not all(type(key) is int and 0 <= key <= MAX_TOKENS for key in shares):
        raise ValueError(f"a length is not a whole number from 0 to {MAX_TOKENS}")
    if not np.all(weights >= 0) or not 0 < weights.sum() < np.inf:
        raise ValueError("a share is negative or not finite, or all are 0")
    return Lengths(np.array(list(shares), dtype=np.int64), np.cumsum(weights))
