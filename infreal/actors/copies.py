"""Copies of KV blocks between two processes: a header with the size of a piece, then the pieces. Both ends run in threads.

A header of 0 in place of a copy: there is none (a Store was given up, or a loan is gone).
"""

from collections.abc import Callable, Sequence

import torch

from infreal.executor import Executor
from infreal.transport import TransportError

PIECE_BLOCKS = 16  # in one message, where the pace does not say less
NOTHING = 0


def send_copy(
    executor: Executor, peer: int, tag: int, blocks: Sequence[int], pace_blocks: int, wait: Callable[[], None]
) -> None:
    """pace_blocks: in a message, 0: as fits; wait() is called before each, and returns when it may go. Raises TransportError."""
    piece = min(pace_blocks or PIECE_BLOCKS, len(blocks))
    send_header(executor, peer, tag, piece)
    for first in range(0, len(blocks), piece):
        wait()
        executor.send_blocks(peer, tag, blocks[first : first + piece])


def send_header(executor: Executor, peer: int, tag: int, piece_blocks: int) -> None:
    executor.transport.send(peer, tag, torch.tensor([piece_blocks]))


def receive_copy(executor: Executor, peer: int, tag: int, blocks: Sequence[int], patience: float) -> bool:
    """Into these blocks. False where there is nothing to copy; raises TransportError where nothing comes, or nonsense."""
    header = torch.zeros(1, dtype=torch.int64)
    executor.receive(peer, tag, header, patience)
    piece = int(header)
    if piece == NOTHING:
        return False
    if not 0 < piece <= len(blocks):
        raise TransportError(f"a header of {piece} blocks for {len(blocks)} (peer {peer}, tag {tag})")
    for first in range(0, len(blocks), piece):
        executor.receive_blocks(peer, tag, blocks[first : first + piece], patience)
    return True
