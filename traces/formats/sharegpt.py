"""ShareGPT conversations: a JSON list of `{"id", "conversations": [{"from", "value"}]}`; lengths come from a tokenizer file.

Every message of a person is a row. The reply that follows is its output; its input is the whole conversation up to and
including it, so later turns are kept, with their history. Dropped and counted: a message without a reply, a conversation
without a message of a person. The list is read piece by piece: memory holds one conversation at a time.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import InputError
from traces.chunk import Chunk
from traces.files import MAX_LINE_BYTES, TraceFile
from traces.options import LoadOptions
from traces.trace import Account

PEOPLE = ("human", "user")
MODELS = ("gpt", "chatgpt", "bing", "bard", "assistant", "model")
CHUNK_CONVERSATIONS = 1000
OPEN, COMMA, CLOSE, EMPTY = (re.compile(mark) for mark in (r"\s*\[\s*", r"\s*,\s*", r"\s*\]", r"\s*\[\s*\]"))

Count = Callable[[str], int]
Turn = tuple[int, int, int]  # input tokens, output tokens, number of the turn from 1


def read(file: TraceFile, options: LoadOptions, account: Account) -> Iterator[Chunk]:
    """No times. A session is one conversation, in the order of the file."""
    count = token_counter(str(options.tokenizer))
    account.notes.append(f"lengths are of the message texts alone, by the tokenizer of sha256 {_sha256(options)}")
    batch: list[tuple[int, str, Turn]] = []
    dropped: dict[str, int] = {}
    for number, entry in enumerate(json_items(file)):
        name, turns = turns_of(entry, f"{file.path}, entry {number + 1}", count, dropped)
        batch += [(number, name or str(number + 1), turn) for turn in turns]
        if (number + 1) % CHUNK_CONVERSATIONS == 0:
            yield _chunk(batch, dropped)
            batch, dropped = [], {}
    yield _chunk(batch, dropped)


def _sha256(options: LoadOptions) -> str:
    return hashlib.sha256(Path(str(options.tokenizer)).read_bytes()).hexdigest()


def _chunk(batch: list[tuple[int, str, Turn]], dropped: dict[str, int]) -> Chunk:
    table = np.array([(session, *turn) for session, _, turn in batch], dtype=np.int64).reshape(-1, 4)
    ids = np.array([f"{name}/{turn[2]}" for _, name, turn in batch], dtype=object)
    more = {"ids": ids, "session": table[:, 0], "turn": table[:, 3], "source_row": table[:, 0] + 1}
    return Chunk(None, table[:, 1], table[:, 2], more, dropped)


def turns_of(entry: Any, where: str, count: Count, dropped: dict[str, int]) -> tuple[str, list[Turn]]:
    """Name and turns of one conversation; what is no request is counted in `dropped`."""
    messages = _messages(entry, where)
    history_tokens, asked, turns, num_people = 0, False, [], 0
    for speaker, text in messages:
        tokens = count(text)
        if speaker in PEOPLE:
            _count(dropped, "no_reply", asked)
            asked, num_people = True, num_people + 1
        elif speaker in MODELS and asked:
            turns.append((history_tokens, tokens, num_people))
            asked = False
        history_tokens += tokens
    _count(dropped, "no_reply", asked)
    _count(dropped, "no_human_message", num_people == 0)
    return str(entry.get("id", "")), turns


def _count(dropped: dict[str, int], reason: str, happened: bool) -> None:
    if happened:
        dropped[reason] = dropped.get(reason, 0) + 1


def _messages(entry: Any, where: str) -> list[tuple[str, str]]:
    """`(speaker, text)` of a conversation; raises where the entry is built otherwise."""
    messages = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(messages, list):
        raise InputError(f"{where}: no list 'conversations'")
    for index, message in enumerate(messages, 1):
        fields = [message.get("from"), message.get("value")] if isinstance(message, dict) else []
        if len(fields) != 2 or not all(isinstance(field, str) for field in fields):
            raise InputError(f"{where}, message {index}: needs the texts 'from' and 'value'")
    return [(message["from"], message["value"]) for message in messages]


def token_counter(path: str) -> Count:
    """Text → number of tokens, without special ones; needs the library `tokenizers`."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError("sharegpt: lengths need the library tokenizers; pip install 'infsim[real]'") from None
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path}: not a tokenizer.json ({str(error).splitlines()[0][:160]})") from None

    def count(text: str) -> int:
        clean = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is valid JSON and no text
        return len(tokenizer.encode(clean, add_special_tokens=False).ids)

    return count


def json_items(file: TraceFile) -> Iterator[Any]:
    """Items of a JSON list, one at a time; raises where the text is not one."""
    decoder, before, text, position, num_items = json.JSONDecoder(), OPEN, "", 0, 0
    for piece in _texts(file):
        text, position = text[position:] + piece, 0
        while begin := before.match(text, position):
            try:
                item, position = decoder.raw_decode(text, begin.end())
            except (ValueError, RecursionError):
                break  # the item goes on in the next piece, or the file is damaged: then it never ends
            before, num_items = COMMA, num_items + 1
            yield item
        if len(text) - position > MAX_LINE_BYTES or (num_items == 0 and text.strip() and not OPEN.match(text)):
            break
    end = CLOSE.match(text, position) or (num_items == 0 and EMPTY.match(text))
    if not end or text[end.end() :].strip():
        raise InputError(f"{file.path}, after entry {num_items}: not a JSON list of conversations")
    if num_items == 0:
        raise InputError(f"{file.path}: is empty")


def _texts(file: TraceFile) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in file.pieces():
            yield decoder.decode(piece)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise InputError(f"{file.path}: not UTF-8; not a text file") from None
