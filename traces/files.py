"""Bytes of a trace file: opening, unzipping, hashing, cutting into blocks of whole lines. Knows no format.

Everything is streamed: memory is bounded by the block, whatever the size of the file.
"""

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol, cast

from perfmodel.errors import InputError

BLOCK_BYTES = 1 << 23
MAX_LINE_BYTES = 1 << 26
BOM = b"\xef\xbb\xbf"
OTHER_ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class Readable(Protocol):
    """What bytes come from."""

    def read(self, size: int = -1, /) -> bytes: ...


class HashingReader:
    """A readable that hashes what passes and reports how much did."""

    def __init__(self, raw: IO[bytes], advance: Callable[[int], None]) -> None:
        self._raw = raw
        self._advance = advance
        self._sha256 = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        piece = self._raw.read(size)
        self._sha256.update(piece)
        self._advance(len(piece))
        return piece

    def hexdigest(self) -> str:
        """Hash of the whole file; reads what the consumer left unread."""
        while self.read(BLOCK_BYTES):
            pass
        return self._sha256.hexdigest()


@dataclass
class TraceFile:
    """One regular file. `sha256` is that of the bytes on disk (zipped or not), known once it was read to its end."""

    path: Path
    advance: Callable[[int], None] = lambda _: None
    sha256: str = ""
    is_gzip: bool = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if self.path.is_dir():
            raise InputError(f"{self.path}: is a folder, a file is needed")
        if not self.path.exists():
            raise InputError(f"{self.path}: no such file")
        if not self.path.is_file():
            raise InputError(f"{self.path}: is not a regular file")
        try:
            self.num_bytes = self.path.stat().st_size
            with self.path.open("rb") as raw:
                self.is_gzip = raw.read(2) == b"\x1f\x8b"
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from None

    def where(self, line: int) -> str:
        return f"{self.path}, line {line}"

    def pieces(self) -> Iterator[bytes]:
        """The content, unzipped, in pieces of at most `BLOCK_BYTES`, without a byte order mark."""
        try:
            with self.path.open("rb") as raw:
                hashed = HashingReader(raw, self.advance)
                stream: Readable = gzip.GzipFile(fileobj=cast(IO[bytes], hashed)) if self.is_gzip else hashed
                piece = self._without_mark(stream.read(BLOCK_BYTES))
                while piece:
                    yield piece
                    piece = stream.read(BLOCK_BYTES)
                self.sha256 = hashed.hexdigest()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{self.path}: damaged gzip file ({error})") from None
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from None

    def _without_mark(self, piece: bytes) -> bytes:
        if piece[:2] in OTHER_ENCODINGS:
            raise InputError(f"{self.path}: text is {OTHER_ENCODINGS[piece[:2]]}; UTF-8 is needed")
        return piece.removeprefix(BOM)

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """`(number of the first line, whole lines)` from 1; the last line may lack its newline. Refuses binary content."""
        line, rest = 1, b""
        for piece in self.pieces():
            rest += piece
            cut = rest.rfind(b"\n") + 1
            if cut == 0 and len(rest) > MAX_LINE_BYTES:
                raise InputError(f"{self.where(line)}: longer than {MAX_LINE_BYTES >> 20} MiB; not a file of rows")
            block, rest = rest[:cut], rest[cut:]
            if block:
                self._check_text(block, line)
                yield line, block
                line += block.count(b"\n")
        if rest:
            self._check_text(rest, line)
            yield line, rest

    def _check_text(self, block: bytes, first_line: int) -> None:
        zero = block.find(b"\0")
        if zero >= 0:
            line = first_line + block.count(b"\n", 0, zero)
            raise InputError(f"{self.where(line)}: byte 0x00; not a text file")
        if block.isascii():
            return
        try:
            block.decode("utf-8")
        except UnicodeDecodeError as error:
            line = first_line + block.count(b"\n", 0, error.start)
            raise InputError(
                f"{self.where(line)}: byte 0x{block[error.start]:02x} is not UTF-8; not a text file"
            ) from None
