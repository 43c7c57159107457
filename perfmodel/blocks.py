"""BlockPool: the KV blocks of one instance.

Owns the free list, the pins, and how many blocks are in each state. Knows nothing of requests: it hands out ids and takes them
back, and whoever holds them says as what. After every event: free + local + reserved + lent + draining = total (design: one
owner a block).
"""

from collections.abc import Iterable, Sequence
from enum import Enum


class Owner(Enum):
    """As what blocks are held."""

    LOCAL = "local"  # of a request that lives here
    RESERVED = "reserved"  # promised to a debtor, its data is not here yet
    LENT = "lent"  # holds a debtor's data


class BlockPool:
    """`total` KV blocks with real ids 0 … total − 1. Freed blocks are reused last in, first out."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self.local = 0
        self.reserved = 0
        self.lent = 0
        self._draining: set[int] = set()  # the owner is gone, but an iteration or a transfer still uses them
        self._pins: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def draining(self) -> int:
        return len(self._draining)

    @property
    def used(self) -> int:
        """Blocks that hold data of some request: local + lent."""
        return self.local + self.lent

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks as local ones. The caller has checked that there are enough."""
        self.local += num_blocks
        return self._take(num_blocks)

    def allocate_one(self) -> int:
        """`allocate(1)[0]`, the hot path of growing rows."""
        self.local += 1
        return self._free.pop()

    def reserve(self, num_blocks: int) -> list[int]:
        """Promise `num_blocks` free blocks to a debtor."""
        self.reserved += num_blocks
        return self._take(num_blocks)

    def lend(self, num_blocks: int) -> None:
        """The data of so many reserved blocks has arrived."""
        assert 0 <= num_blocks <= self.reserved, f"{num_blocks} of {self.reserved} reserved blocks are lent"
        self.reserved -= num_blocks
        self.lent += num_blocks

    def release(self, blocks: Sequence[int], owner: Owner = Owner.LOCAL, fence: bool = False) -> None:
        """Give blocks up. Pinned ones drain first; where a running iteration may use them (`fence`) all are, until `unpin`."""
        self._give_up(len(blocks), owner)
        if fence:
            self.pin(blocks)
        if self._pins.keys().isdisjoint(blocks):
            self._free.extend(reversed(blocks))
            return
        for block in blocks:
            if block in self._pins:
                self._draining.add(block)
            else:
                self._free.append(block)

    def pin(self, blocks: Iterable[int]) -> None:
        """A transfer, a serve or a fence uses these blocks: released ones drain until `unpin`."""
        for block in blocks:
            self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, blocks: Iterable[int]) -> None:
        """End one use of these blocks; draining ones without any use left become free."""
        for block in blocks:
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]
                if block in self._draining:
                    self._draining.remove(block)
                    self._free.append(block)

    def is_pinned(self, block: int) -> bool:
        return block in self._pins

    def free_ids(self) -> list[int]:
        return list(self._free)

    def check_invariants(self) -> None:
        """Conservation, and nothing pinned is free."""
        counts = [self.free, self.local, self.reserved, self.lent, self.draining]
        assert min(counts) >= 0, f"blocks {counts}"
        assert sum(counts) == self.total, f"blocks {counts} are not {self.total}"
        assert self._pins.keys().isdisjoint(self._free), "a pinned block is free"
        assert self._draining <= self._pins.keys(), "nobody uses a block that drains"

    def check_owners(self, held: Sequence[int]) -> None:
        """`held`: every block that a request or a loan here owns. Each block is free, or drains, or has one owner."""
        ids = sorted([*held, *self._free, *self._draining])
        assert ids == list(range(self.total)), (
            f"{len(ids)} owners of {self.total} blocks, {len(set(ids))} different ones"
        )

    def _take(self, num_blocks: int) -> list[int]:
        assert 0 <= num_blocks <= self.free, f"{num_blocks} blocks asked for, {self.free} free"
        if not num_blocks:
            return []
        ids = self._free[: -num_blocks - 1 : -1]
        del self._free[-num_blocks:]
        return ids

    def _give_up(self, num_blocks: int, owner: Owner) -> None:
        if owner is Owner.LOCAL:
            self.local -= num_blocks
        elif owner is Owner.LENT:
            self.lent -= num_blocks
        else:
            self.reserved -= num_blocks
        assert self.local >= 0 <= self.lent and self.reserved >= 0, f"{num_blocks} blocks are not {owner.value}"
