"""Copies of KV blocks in progress: Stores, whose two ends must both be known before data flows, and fetches.

A Store of a debtor that runs is paced: so many blocks an iteration, sent between the layers of its iterations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from infreal.dist_attention import FETCH, STORE, tag_of
from infreal.executor import Executor
from perfmodel.messages import LoanId, PostReceive, StartTransfer, TransferId


@dataclass(slots=True)
class Move:
    """Blocks on their way from `src` to `dst`. into None: the receiver is not ready yet · read: the creditor's read of a fetch ·
    pace_blocks: blocks in one iteration of the source, 0: all at once."""

    transfer: TransferId
    loan: LoanId
    src: int
    dst: int
    blocks: Sequence[int]
    into: Sequence[int] | None = None
    read: int | None = None
    pace_blocks: int = 0
    sent: int = 0
    sent_in: int = -1  # the iteration of the source in which blocks were sent last

    @property
    def is_done(self) -> bool:
        return self.sent == len(self.blocks)


def start_store(debtor: int, command: StartTransfer, block_tokens: int) -> Move:
    pace = -(-command.tokens_per_iteration // block_tokens)
    return Move(command.transfer, command.loan, debtor, command.peer, command.blocks, pace_blocks=pace)


class Moves:
    """All copies of a run between the instances of one process."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors
        self._open: dict[TransferId, Move] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, move: Move) -> None:
        self._open[move.transfer] = move

    def receive(self, command: PostReceive) -> bool:
        """The receiver of a Store is ready. False where the sender has given up."""
        move = self._open.get(command.transfer)
        if move is not None:
            move.into = command.blocks
        return move is not None

    def give_up(self, transfer: TransferId) -> Move | None:
        """A Store whose receive was never posted; None where it flows or has ended."""
        move = self._open.get(transfer)
        return self._open.pop(transfer) if move is not None and move.into is None else None

    def advance(self) -> list[Move]:
        """Copy what may be copied now. Returns the moves that are complete."""
        for move in self._open.values():
            if move.into is not None and self._may_send(move):
                self._send(move)
        done = [move for move in self._open.values() if move.is_done]
        for move in done:
            del self._open[move.transfer]
        return done

    def _may_send(self, move: Move) -> bool:
        source = self._executors[move.src]
        return not move.pace_blocks or source.step is None or move.sent_in != source.num_iterations

    def _send(self, move: Move) -> None:
        assert move.into is not None
        source, target = self._executors[move.src], self._executors[move.dst]
        num_left = len(move.blocks) - move.sent
        paced = move.pace_blocks and source.step is not None
        piece = slice(move.sent, move.sent + (min(move.pace_blocks, num_left) if paced else num_left))
        tag = tag_of(STORE if move.read is None else FETCH, move.transfer.number)
        source.send_blocks(move.dst, tag, move.blocks[piece])
        target.receive_blocks(move.src, tag, move.into[piece])
        move.sent, move.sent_in = piece.stop, source.num_iterations
