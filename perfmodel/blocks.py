"""BlockPool: who owns each KV block of one instance.

Owns the free list and the state of every block id. Knows nothing of requests: it hands out ids and takes them back.
After every event: free + local + reserved + lent + draining = total (design: one owner a block).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum


class Owner(IntEnum):
    """State of a block."""

    FREE = 0
    LOCAL = 1  # of a request that lives here
    RESERVED = 2  # promised to a debtor, its data is not here yet
    LENT = 3  # holds a debtor's data
    DRAINING = 4  # its owner is gone, but an iteration or a transfer still uses it


class BlockPool:
    """`total` KV blocks with real ids 0 … total − 1. Freed blocks are reused last in, first out."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._owner = bytearray(total)  # Owner of each id; FREE is 0
        self.local = 0
        self.reserved = 0
        self.lent = 0
        self.draining = 0
        self._pins: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that hold data of some request: local + lent."""
        return self.local + self.lent

    def owner(self, block: int) -> Owner:
        return Owner(self._owner[block])

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks as local ones. The caller has checked that there are enough."""
        ids = self._take(num_blocks)
        owner = self._owner
        for block in ids:
            owner[block] = Owner.LOCAL
        self.local += num_blocks
        return ids

    def allocate_one(self) -> int:
        """`allocate(1)[0]`, the hot path of growing rows."""
        block = self._free.pop()
        self._owner[block] = Owner.LOCAL
        self.local += 1
        return block

    def reserve(self, num_blocks: int) -> list[int]:
        """Promise `num_blocks` free blocks to a debtor."""
        ids = self._take(num_blocks)
        for block in ids:
            self._owner[block] = Owner.RESERVED
        self.reserved += num_blocks
        return ids

    def mark_lent(self, blocks: Iterable[int]) -> None:
        """Reserved blocks whose data has arrived."""
        for block in blocks:
            assert self._owner[block] == Owner.RESERVED, (block, self.owner(block))
            self._owner[block] = Owner.LENT
            self.reserved -= 1
            self.lent += 1

    def release(self, blocks: Sequence[int], fence: bool = False) -> None:
        """Give blocks up. Pinned ones drain first; where a running iteration may use them (`fence`) all are, until `unpin`."""
        if fence:
            self.pin(blocks)
        if self._pins.keys().isdisjoint(blocks):
            self._free_all(blocks)
            return
        for block in blocks:
            self._give_up(self._owner[block], 1)
            if block in self._pins:
                self._owner[block] = Owner.DRAINING
                self.draining += 1
            else:
                self._owner[block] = Owner.FREE
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
                if self._owner[block] == Owner.DRAINING:
                    self._owner[block] = Owner.FREE
                    self.draining -= 1
                    self._free.append(block)

    def is_pinned(self, block: int) -> bool:
        return block in self._pins

    def check_invariants(self) -> None:
        """Conservation: every block is counted once, and nothing pinned is free."""
        counts = [self._owner.count(owner) for owner in Owner]
        assert counts == [self.free, self.local, self.reserved, self.lent, self.draining], (
            f"blocks {counts} against counters {[self.free, self.local, self.reserved, self.lent, self.draining]}"
        )
        assert sum(counts) == self.total
        assert len(set(self._free)) == self.free, "a block is twice in the free list"
        assert not any(map(self._owner.__getitem__, self._free)), "a block in the free list is not free"
        assert all(self._owner[block] != Owner.FREE for block in self._pins), "a pinned block is free"

    def _take(self, num_blocks: int) -> list[int]:
        assert 0 <= num_blocks <= self.free, f"{num_blocks} blocks asked for, {self.free} free"
        if not num_blocks:
            return []
        ids = self._free[: -num_blocks - 1 : -1]
        del self._free[-num_blocks:]
        return ids

    def _free_all(self, blocks: Sequence[int]) -> None:
        owner = self._owner
        for state, num_blocks in Counter(map(owner.__getitem__, blocks)).items():
            self._give_up(state, num_blocks)
        for block in blocks:
            owner[block] = 0
        self._free.extend(reversed(blocks))

    def _give_up(self, owner: int, num_blocks: int) -> None:
        if owner == Owner.LOCAL:
            self.local -= num_blocks
        elif owner == Owner.RESERVED:
            self.reserved -= num_blocks
        elif owner == Owner.LENT:
            self.lent -= num_blocks
        else:
            raise AssertionError(f"a block is {Owner(owner).name}, nobody owns it")
