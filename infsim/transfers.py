"""Transfers of KV blocks: Stores, whose two ends must both be posted before data flows, and fetches. They share links."""

from collections.abc import Callable
from dataclasses import dataclass

from infsim.links import Links
from perfmodel.messages import LoanId, PostReceive, StartFetch, StartTransfer, TransferId


@dataclass(slots=True)
class Transfer:
    """A transfer in progress; data flows from `src` to `dst`. `read`: the creditor's read of a fetch."""

    transfer: TransferId
    loan: LoanId
    src: int
    dst: int
    num_blocks: int
    rate_cap: float = float("inf")
    read: int | None = None
    flowing: bool = False


class Transfers:
    """All transfers of a run. rate_cap(instance, tokens_per_iteration) → bytes/s that pacing allows."""

    def __init__(self, links: Links, block_bytes: int, rate_cap: Callable[[int, int], float]) -> None:
        self.links = links
        self._block_bytes = block_bytes
        self._rate_cap = rate_cap
        self._open: dict[TransferId, Transfer] = {}
        self._given_up: set[TransferId] = set()

    def __len__(self) -> int:
        return len(self._open)

    def send(self, debtor: int, command: StartTransfer, now_s: float) -> None:
        """The sender is ready; data flows when the receiver is."""
        cap = self._rate_cap(debtor, command.tokens_per_iteration)
        self._open[command.transfer] = Transfer(
            command.transfer, command.loan, debtor, command.peer, len(command.blocks), cap
        )

    def receive(self, creditor: int, command: PostReceive, now_s: float) -> Transfer | None:
        """The receiver is ready. None where the sender has given up."""
        transfer = self._open.get(command.transfer)
        if transfer is not None:
            self._flow(transfer, now_s)
        return transfer

    def fetch(self, debtor: int, command: StartFetch, read: int, now_s: float) -> Transfer:
        """The creditor serves a fetch: data flows at once."""
        transfer = Transfer(command.transfer, command.loan, command.peer, debtor, len(command.blocks), read=read)
        self._open[command.transfer] = transfer
        self._flow(transfer, now_s)
        return transfer

    def _flow(self, transfer: Transfer, now_s: float) -> None:
        transfer.flowing = True
        num_bytes = transfer.num_blocks * self._block_bytes
        self.links.start(transfer.transfer, transfer.src, transfer.dst, num_bytes, now_s, transfer.rate_cap)

    def take_complete(self, now_s: float) -> list[Transfer]:
        """Transfers whose last byte has arrived."""
        return [self._open.pop(TransferId(*i)) for i in self.links.complete(now_s)]

    def give_up(self, transfer: TransferId) -> Transfer | None:
        """A Store whose receive was never posted; None where it flows or has ended."""
        held = self._open.get(transfer)
        return self._open.pop(transfer) if held is not None and not held.flowing else None

    def lose(self, instance: int, now_s: float) -> list[Transfer]:
        """Every transfer with an end at a lost instance breaks off."""
        lost = [t for t in self._open.values() if instance in (t.src, t.dst)]
        for transfer in lost:
            del self._open[transfer.transfer]
            if transfer.flowing:
                self.links.cancel(transfer.transfer, now_s)
        return lost
