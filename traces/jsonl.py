"""Rows of a JSONL file as checked values. Errors name file, line, field and value."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfmodel.errors import InputError
from traces.catalogue import fitting_format
from traces.chunk import MAX_TOKENS
from traces.files import TraceFile
from traces.trace import Ints

CHUNK_ROWS = 50_000


@dataclass(frozen=True)
class Row:
    """One JSON object and where it stands; field names are matched in any case."""

    where: str
    values: dict[str, Any]

    def value(self, name: str) -> Any:
        if name not in self.values:
            shown = ", ".join(self.values)[:200] or "none"
            raise InputError(f"{self.where}: no field {name!r} (fields: {shown}){fitting_format(list(self.values))}")
        return self.values[name]

    def fail(self, name: str, allowed: str) -> InputError:
        shown = repr(self.values[name])
        return InputError(f"{self.where}, field {name}: {shown[:60]}{'…' * (len(shown) > 60)} is not {allowed}")

    def integer(self, name: str, low: int = 0, high: int = MAX_TOKENS) -> int:
        """A whole number in [low, high]; `12.0` counts as whole."""
        value = self.value(name)
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole or not low <= value <= high:
            raise self.fail(name, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, name: str) -> float:
        """A finite number ≥ 0."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e15:
            raise self.fail(name, "a number from 0 to 1e15")
        return float(value)

    def integers(self, name: str) -> Ints:
        """A list of whole numbers that fit 64 bits."""
        value = self.value(name)
        if not isinstance(value, list):
            raise self.fail(name, "a list of whole numbers")
        try:
            numbers = np.array(value) if value else np.zeros(0, dtype=np.int64)
        except (ValueError, OverflowError):  # lists of unequal length inside
            numbers = np.zeros(0)
        if numbers.dtype != np.int64 or numbers.ndim != 1:
            raise self.fail(name, "a list of whole numbers")
        return numbers

    def check_cover(self, name: str, input_tokens: int, block_tokens: int) -> None:
        """The hash list has one block per `block_tokens` of input, the last one begun."""
        found, needed = len(self.values[name]), -(-input_tokens // block_tokens)
        if found != needed:
            raise InputError(
                f"{self.where}, field {name}: {found} blocks of {block_tokens} tokens do not cover an input of "
                f"{input_tokens} tokens, {needed} do"
            )


def json_rows(file: TraceFile) -> Iterator[Row]:
    """One `Row` per line that is not blank."""
    num_rows = 0
    for first_line, data in file.blocks():
        for line, text in enumerate(data.split(b"\n"), first_line):
            if text.strip():
                num_rows += 1
                yield Row(file.where(line), _object(file, line, text))
    if not num_rows:
        raise InputError(f"{file.path}: is empty")


def row_batches(file: TraceFile) -> Iterator[list[Row]]:
    """The rows in lists of at most `CHUNK_ROWS`."""
    batch: list[Row] = []
    for row in json_rows(file):
        batch.append(row)
        if len(batch) == CHUNK_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _object(file: TraceFile, line: int, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        header = text.strip().decode("utf-8", "replace").lower().split(",")
        raise InputError(f"{file.where(line)}: {_shown(text)} is not a JSON object{fitting_format(header)}")
    return {key.lower(): item for key, item in value.items()}


def _shown(text: bytes) -> str:
    shown = text.strip().decode("utf-8", "replace")
    return repr(shown if len(shown) <= 60 else shown[:57] + "…")
