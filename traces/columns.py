"""Columns of a CSV or Parquet file, block by block, as checked numpy arrays. Errors name file, line, column and value.

The parsing is pyarrow's; a block is walked again in Python only to find the line of an error.
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from perfmodel.errors import InputError
from traces.catalogue import fitting_format
from traces.chunk import MAX_TOKENS
from traces.files import TraceFile
from traces.trace import Floats, Ints

_INSTANT = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,9})?"
_NAIVE = _INSTANT + "$"
_AWARE = _INSTANT + r"(Z|[+-]\d\d(:?\d\d)?)$"
NO_CAST = (pa.ArrowInvalid, pa.ArrowNotImplementedError)
INSTANT_TEXT = "a time like 2023-11-16 18:15:46.6805900 or 2024-05-10T00:00:00.009Z"


@dataclass(frozen=True)
class Block:
    """Some consecutive rows of the wanted columns (keys in lower case); `where(i)` says where row i stands in the file."""

    columns: dict[str, pa.Array]
    names: dict[str, str]
    num_rows: int
    where: Callable[[int], str]

    def has(self, column: str) -> bool:
        return column.lower() in self.columns

    def fail(self, column: str, row: int, allowed: str) -> InputError:
        value = self.columns[column.lower()][row].as_py()
        shown = repr(value if not isinstance(value, str) or len(value) <= 60 else value[:57] + "…")
        return InputError(f"{self.where(row)}, column {self.names[column.lower()]}: {shown} is not {allowed}")

    def floats(self, column: str, *, low: float = 0.0) -> Floats:
        """Finite numbers ≥ `low`."""
        text = f"a finite number ≥ {low:g}"
        values = self._numbers(column, pa.float64(), text)
        self._check(column, np.isfinite(values) & (values >= low), text)
        return values

    def integers(self, column: str, *, low: int = 0, high: int = MAX_TOKENS) -> Ints:
        """Whole numbers in [low, high]; `12.0` counts as whole."""
        text = f"a whole number from {low} to {high}"
        array = self._filled(column, text)
        try:
            values = np.asarray(array.cast(pa.int64()))
        except NO_CAST:
            floats = self._numbers(column, pa.float64(), text)
            self._check(column, np.isfinite(floats) & (np.abs(floats) < 2**53) & (np.floor(floats) == floats), text)
            values = floats.astype(np.int64)
        self._check(column, (values >= low) & (values <= high), text)
        return values

    def instants(self, column: str) -> tuple[Ints, bool]:
        """Nanoseconds since 1970, and whether the times carry a zone; raises where some do and some do not."""
        array = self._filled(column, INSTANT_TEXT)
        if not pa.types.is_string(array.type):
            array = array.cast(pa.string())
        is_aware = bool(len(array)) and _matches(array.slice(0, 1), _AWARE)
        good = np.asarray(pc.match_substring_regex(array, _AWARE if is_aware else _NAIVE))
        if not good.all():
            odd = int(np.argmin(good))
            if _matches(array.slice(odd, 1), _NAIVE if is_aware else _AWARE):
                above = "have" if is_aware else "lack"
                raise self.fail(column, odd, f"like the rows above it, which {above} a time zone")
            raise self.fail(column, odd, INSTANT_TEXT)
        return self._cast_instants(column, array, is_aware), is_aware

    def texts(self, column: str) -> list[str]:
        """Strings; a missing value is the empty string."""
        return ["" if value is None else str(value) for value in self.columns[column.lower()].to_pylist()]

    def _cast_instants(self, column: str, array: pa.Array, is_aware: bool) -> Ints:
        kind = pa.timestamp("ns", tz="UTC" if is_aware else None)
        try:
            return np.asarray(array.cast(kind).cast(pa.int64()))
        except pa.ArrowInvalid:
            row = next(i for i in range(len(array)) if _cast_fails(array.slice(i, 1), kind))
            raise self.fail(column, row, INSTANT_TEXT) from None

    def _numbers(self, column: str, kind: pa.DataType, text: str) -> npt.NDArray[Any]:
        array = self._filled(column, text)
        if pa.types.is_string(array.type):
            array = pc.utf8_trim_whitespace(array)
        try:
            return np.asarray(array.cast(kind))
        except NO_CAST:
            bad = (i for i in range(len(array)) if _cast_fails(array.slice(i, 1), kind))
            raise self.fail(column, next(bad), text) from None

    def _filled(self, column: str, text: str) -> pa.Array:
        array = self.columns[column.lower()]
        if array.null_count:
            raise self.fail(column, int(np.argmax(np.asarray(array.is_null()))), text)
        if pa.types.is_boolean(array.type) and len(array):
            raise self.fail(column, 0, text)
        return array

    def _check(self, column: str, good: npt.NDArray[np.bool_], text: str) -> None:
        if not good.all():
            raise self.fail(column, int(np.argmin(good)), text)


def _matches(array: pa.Array, pattern: str) -> bool:
    """Whether the one text in `array` matches."""
    return bool(pc.match_substring_regex(array, pattern)[0].as_py())


def _cast_fails(array: pa.Array, kind: pa.DataType) -> bool:
    try:
        array.cast(kind)
    except NO_CAST:
        return True
    return False


def csv_blocks(file: TraceFile, needed: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Block]:
    """The named columns of a CSV file with a header (any case, any order, other columns ignored)."""
    header: list[str] = []
    for first_line, data in file.blocks():
        line, body = first_line, data
        if not header:
            line, header, body = _take_header(first_line, data)
            names = match_columns(file.where(line - 1), header, needed, optional) if header else {}
        if body.strip():
            yield _parse_block(file, line, body, header, names)
    if not header:
        raise InputError(f"{file.path}: is empty")


def _take_header(line: int, data: bytes) -> tuple[int, list[str], bytes]:
    """`(line after the header, column names, what follows)`; blank lines before the header are skipped."""
    while data:
        text, _, data = data.partition(b"\n")
        line += 1
        if text.strip():
            return line, [name.strip() for name in _fields(text)], data
    return line, [], b""


def _fields(line: bytes) -> list[str]:
    text = line.decode("utf-8").rstrip("\r\n")
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return [text]


def match_columns(where: str, present: list[str], needed: Sequence[str], optional: Sequence[str]) -> dict[str, str]:
    """Wanted column in lower case → its name in the file. Raises for a missing or a doubled one, naming a format that fits."""
    lower = [name.lower() for name in present]
    missing = [name for name in needed if name.lower() not in lower]
    if missing:
        shown = ", ".join(present)[:200] or "none"
        raise InputError(f"{where}: no column {missing[0]!r} (columns: {shown}){fitting_format(lower)}")
    doubled = [name for name in (*needed, *optional) if lower.count(name.lower()) > 1]
    if doubled:
        raise InputError(f"{where}: column {doubled[0]!r} appears twice")
    return {name.lower(): present[lower.index(name.lower())] for name in (*needed, *optional) if name.lower() in lower}


def _parse_block(file: TraceFile, line: int, body: bytes, header: list[str], names: dict[str, str]) -> Block:
    wanted = list(names.values())
    positions = {f"c{header.index(name)}": name.lower() for name in wanted}
    try:
        table = pacsv.read_csv(
            io.BytesIO(body),
            read_options=pacsv.ReadOptions(
                column_names=[f"c{i}" for i in range(len(header))], block_size=len(body) + 1
            ),
            convert_options=pacsv.ConvertOptions(
                include_columns=list(positions),
                column_types=dict.fromkeys(positions, pa.string()),
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid as error:
        raise _ragged(file, line, body, len(header), error) from None
    columns = {positions[key]: _whole(table.column(key)) for key in positions}
    return Block(columns, names, table.num_rows, lambda row: file.where(_line_of(body, line, row)))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _line_of(body: bytes, first_line: int, row: int) -> int:
    """Line of the row-th data row, blank lines not counted."""
    lines = (number for number, text in enumerate(body.split(b"\n"), first_line) if text.strip(b"\r"))
    return next((number for index, number in enumerate(lines) if index == row), first_line)


def _ragged(file: TraceFile, first_line: int, body: bytes, num_fields: int, error: pa.ArrowInvalid) -> InputError:
    for line, text in enumerate(body.split(b"\n"), first_line):
        found = len(_fields(text))
        if text.strip() and found != num_fields:
            return InputError(f"{file.where(line)}: {found} fields, the header has {num_fields}")
    return InputError(f"{file.path}, after line {first_line}: {str(error).splitlines()[0][:160]}")
