"""Batching: who is admitted, prompts that stream, growth of decode rows, and plans that are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.batching import NO_BLOCK, Batcher, BatchLimits, Plan, Row
from perfmodel.blocks import BlockPool
from perfmodel.errors import InputError
from perfmodel.messages import Request
from perfmodel.policies import BATCHING


def make(num_blocks=20, headroom_blocks=0, max_batch=None, policy=None, token_budget=1000):
    limits = BatchLimits(16, token_budget, max_batch, headroom_blocks)
    return Batcher(BlockPool(num_blocks), limits, policy or BATCHING["chunked"]())


def wait(batcher, req_id, tokens):
    row = Row(Request(req_id, tokens), 1, req_id, 0.0, tokens, batcher.blocks_for(tokens + 1))
    batcher.enqueue(row)
    return row


def admissible(batcher):
    return [row.req_id for row in batcher.view().admissible()]


def decode(batcher, req_id, tokens):
    row = wait(batcher, req_id, tokens)
    for chunk in batcher.plan(0.0)[0]:
        batcher.compute(chunk)
    batcher.join(row)
    batcher.check_invariants()
    return row


def test_prompts_are_admitted_in_order_until_one_does_not_fit():
    batcher = make(num_blocks=10)
    for req_id, tokens in ((1, 60), (2, 120), (3, 10)):
        wait(batcher, req_id, tokens)
    assert admissible(batcher) == [1], "3 would fit, but 2 came first"


@pytest.mark.parametrize(("idle", "expected"), [(True, [1]), (False, [])])
def test_headroom_is_kept_except_from_the_first_prompt_of_an_idle_instance(idle, expected):
    batcher = make(num_blocks=11, headroom_blocks=2)
    if not idle:
        decode(batcher, 0, 10)
    wait(batcher, 1, 150)
    wait(batcher, 2, 10)
    assert admissible(batcher) == expected


def test_a_barrier_hides_who_came_after_it():
    batcher = make()
    for req_id in (1, 2, 3):
        wait(batcher, req_id, 10)
    batcher.barrier = 2
    assert admissible(batcher) == [1, 2]


def test_max_batch_counts_rows_that_run():
    batcher = make(max_batch=2)
    decode(batcher, 1, 10)
    for req_id in (2, 3):
        wait(batcher, req_id, 10)
    assert admissible(batcher) == [2]


# ---- prompts that stream -----------------------------------------------------------------------------------------------------
def streaming(local_blocks=3, tokens=100):
    batcher = make()
    row = wait(batcher, 1, tokens)
    batcher.dequeue(row)
    row.blocks, row.spare, row.streams = [NO_BLOCK] * row.blocks_needed, batcher.pool.allocate(local_blocks), True
    batcher.prefilling.append(row)
    return batcher, row


def test_a_streaming_prompt_computes_what_it_has_room_for_here():
    batcher, row = streaming()
    (chunk,), _ = batcher.plan(0.0)
    assert (chunk.tokens, chunk.last) == (47, False), "three blocks, one slot kept for the next token"
    assert row.blocks[:4].count(NO_BLOCK) == 1
    batcher.compute(chunk)
    assert batcher.plan(0.0)[0] == (), "no room: it waits for its blocks to leave"


def test_a_streaming_prompt_leaves_most_of_the_budget_to_others():
    batcher, _ = streaming(local_blocks=9, tokens=800)
    assert list(batcher.policy.plan(batcher.view()).chunks) == [(1, 143)]
    wait(batcher, 2, 40)
    assert list(batcher.policy.plan(batcher.view()).chunks) == [(1, 125), (2, 40)]


def test_a_chunk_that_was_not_computed_gives_its_blocks_back():
    batcher, row = streaming()
    (chunk,), _ = batcher.plan(0.0)
    batcher.unplace(chunk)
    assert (len(row.spare), set(row.blocks)) == (3, {NO_BLOCK})


# ---- decode rows -------------------------------------------------------------------------------------------------------------
@given(
    tokens=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    free=st.integers(0, 12),
)
def test_max_iterations_is_how_far_single_iterations_come(tokens, free):
    batcher = make(num_blocks=100)
    for req_id, length in enumerate(tokens):
        decode(batcher, req_id, length)
    batcher.pool.allocate(batcher.pool.free - free)
    expected = batcher.max_iterations()
    iterations = 1
    batcher.advance(1)
    while len(batcher.due()) <= batcher.pool.free and iterations <= expected:
        batcher.grow(batcher.counter)
        batcher.check_invariants()
        batcher.advance(1)
        iterations += 1
    assert iterations == expected


def test_rows_grow_by_one_block_every_16_tokens():
    batcher = make()
    row = decode(batcher, 1, 30)
    lengths = []
    for _ in range(34):
        batcher.advance(1)
        batcher.grow(batcher.counter)
        lengths.append(len(row.blocks))
    assert lengths == [2] * 1 + [3] * 16 + [4] * 16 + [5]


def test_leaving_and_coming_back_keeps_the_context():
    batcher = make()
    row = decode(batcher, 1, 30)
    batcher.advance(1)
    batcher.leave(row)
    assert (row.computed_tokens, row.generated_tokens, batcher.context_tokens) == (31, 2, 0)
    batcher.resume(row, 31)
    batcher.check_invariants()
    assert batcher.kv_tokens(row) == 31


def test_the_youngest_is_the_last_to_arrive_whatever_it_does():
    batcher = make()
    decode(batcher, 5, 10)
    decode(batcher, 3, 10)
    assert batcher.youngest().req_id == 5


# ---- plans that are refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(admit=[9]), "admits request 9, which is not waiting"),
        (Plan(admit=[2]), "admits request 2: it needs 26 blocks, 20 are free"),
        (Plan(admit=[1], chunks=[(1, 51)]), r"a chunk of 51 tokens \(allowed: 1 to 50"),
        (Plan(admit=[1], chunks=[(1, 0)]), r"a chunk of 0 tokens \(allowed: 1 to 50"),
        (Plan(chunks=[(1, 5)]), r"a chunk of 5 tokens \(allowed: 1 to 0"),
    ],
)
def test_wrong_plans_are_refused_by_name(plan, message):
    class Policy:
        first_come = True

        def plan(self, view):
            return plan

    batcher = make(policy=Policy())
    wait(batcher, 1, 50)
    wait(batcher, 2, 400)
    with pytest.raises(InputError, match=message):
        batcher.plan(0.0)
