"""Alibaba Bailian usage traces (qwen-bailian-usagetraces-anon): JSONL, `timestamp` in s, `hash_ids` of 16-token blocks.

`chat_id, parent_chat_id` (−1: the first of its conversation), `turn`. The input of a later turn already holds the history: it
is taken as it stands. A session is a conversation, found by following the parents; one whose beginning lies before the file
is counted in a note and starts a session of its own.
"""

from collections.abc import Iterator

import numpy as np

from traces.chunk import Chunk
from traces.files import TraceFile
from traces.formats.mooncake import lengths, prefixes, times
from traces.jsonl import Row, row_batches
from traces.options import LoadOptions
from traces.trace import Account, Ints

BLOCK_TOKENS = 16
ROOT = -1
MAX_ID = 2**63 - 1


def read(file: TraceFile, options: LoadOptions, account: Account) -> Iterator[Chunk]:
    """Times in seconds."""
    conversations = Conversations()
    for rows in row_batches(file):
        time, (inputs, outputs) = times(rows), lengths(rows)
        more = {
            "ids": np.array([row.integer("chat_id", high=MAX_ID) for row in rows], dtype=np.int64),
            "session": conversations.sessions(rows),
            "turn": np.array([row.integer("turn") for row in rows], dtype=np.int64),
            **prefixes(rows, BLOCK_TOKENS),
        }
        yield Chunk(time, inputs, outputs, more)
    if conversations.num_orphans:
        account.notes.append(f"{conversations.num_orphans} turns follow a parent that is not in the file")


class Conversations:
    """Numbers conversations in order of appearance; a row joins that of its parent."""

    def __init__(self) -> None:
        self._session_of: dict[int, int] = {}
        self._num_sessions = 0
        self.num_orphans = 0

    def sessions(self, rows: list[Row]) -> Ints:
        return np.array([self._join(row) for row in rows], dtype=np.int64)

    def _join(self, row: Row) -> int:
        chat, parent = row.integer("chat_id", high=MAX_ID), row.integer("parent_chat_id", low=ROOT, high=MAX_ID)
        session = self._session_of.get(parent)
        if session is None:
            self.num_orphans += parent != ROOT
            session = self._num_sessions
            self._num_sessions += 1
        self._session_of[chat] = session
        return session
