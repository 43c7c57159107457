"""Copies of KV blocks between two processes: a header with the size of a piece, then the pieces. Both ends run in threads.

A header of 0 in place of a copy: there is none (a Store was given up, or a loan is gone).
"""

from collections.abc import Callable, Sequence

import torch

from infreal.dist_attention import tag_of
from infreal.executor import Executor
from infreal.transport import TransportError
from perfmodel.messages import TransferId

PIECE_BLOCKS = 16  # in one message, where the pace does not say less
NOTHING = 0
INCARNATIONS = 4  # of one debtor whose copies are told apart


def copy_tag(kind: int, transfer: TransferId) -> int:
    """Transfers are numbered anew in each incarnation of their debtor."""
    return tag_of(kind, transfer.number * INCARNATIONS + transfer.debtor_incarnation % INCARNATIONS)


def send_copy(
    executor: Executor, peer: int, tag: int, blocks: Sequence[int], pace_blocks: int, wait: Callable[[], None]
) -> None:
    """pace_blocks: in a message, 0: as fits; wait() is called before each, and returns when it may go. Raises TransportError."""
    piece = min(pace_blocks or PIECE_BLOCKS, len(blocks))  # NOTHING where there are none
    executor.transport.send(peer, tag, torch.tensor([piece]))
    for first in range(0, len(blocks), piece or 1):
        wait()
        executor.send_blocks(peer, tag, blocks[first : first + piece])


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
