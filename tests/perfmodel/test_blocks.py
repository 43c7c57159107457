"""BlockPool: conservation under any sequence of operations, and guards that can fail."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perfmodel.blocks import BlockPool, Owner


class PoolMachine(RuleBasedStateMachine):
    """Random use of one pool, next to a plain dictionary of who holds what."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(20)
        self.held, self.pinned = [], []

    @rule(n=st.integers(1, 5))
    def allocate(self, n):
        if n <= self.pool.free:
            self.held.append((self.pool.allocate(n), Owner.LOCAL))

    @rule(n=st.integers(1, 5))
    def reserve_and_lend(self, n):
        if n <= self.pool.free:
            lent, reserved = self.pool.reserve(n // 2), self.pool.reserve(n - n // 2)
            self.pool.lend(len(lent))
            self.held += [(lent, Owner.LENT), (reserved, Owner.RESERVED)]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin(self, data):
        blocks, _ = data.draw(st.sampled_from(self.held))
        self.pool.pin(blocks)
        self.pinned.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fence=st.booleans())
    def release(self, data, fence):
        blocks, owner = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks, owner, fence)
        if fence:
            self.pinned.append(blocks)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        self.pool.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @invariant()
    def conserved(self):
        self.pool.check_invariants()
        self.pool.check_owners([b for blocks, _ in self.held for b in blocks])
        held = {b for blocks, _ in self.held for b in blocks}
        pinned = {b for blocks in self.pinned for b in blocks}
        assert self.pool.local + self.pool.reserved + self.pool.lent == len(held)
        assert self.pool.draining == len(pinned - held)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_what_a_running_iteration_reads_is_not_free_when_a_transfer_lets_go_of_it():
    """Found by chaos: a transfer that ended freed blocks that had been committed meanwhile, under the step that read them."""
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.pin(blocks)
    pool.release(blocks, fence=True)
    pool.unpin(blocks)  # the transfer
    assert (pool.draining, pool.free) == (2, 2)
    pool.unpin(blocks)  # the iteration
    assert (pool.draining, pool.free) == (0, 4)


def test_a_block_released_twice_is_caught():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="2 blocks are not local"):
        pool.release(blocks)


def test_a_block_released_as_what_it_is_not_is_caught():
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    with pytest.raises(AssertionError, match="1 blocks are not lent"):
        pool.release(blocks, Owner.LENT)


def test_a_block_of_two_owners_is_caught_by_the_invariants():
    pool = BlockPool(4)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.check_owners(first + second)
    with pytest.raises(AssertionError, match="4 owners of 4 blocks, 3 different ones"):
        pool.check_owners(first + first)
    pool.release(first)
    pool.release(first)
    with pytest.raises(AssertionError, match="4 owners of 4 blocks, 3 different ones"):
        pool.check_owners([])


def test_more_than_is_free_is_caught():
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 free"):
        BlockPool(2).allocate(3)
