"""The tensors of an iteration against a plain loop, and rows that cannot be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infreal.model import Row, make_batch

BLOCK_TOKENS = 4


@st.composite
def rows(draw) -> list[Row]:
    found = []
    ids = iter(draw(st.permutations(range(60))))
    for _ in range(draw(st.integers(1, 5))):
        new, before = draw(st.integers(1, 9)), draw(st.integers(0, 20))
        elsewhere = draw(st.integers(0, 3)) * BLOCK_TOKENS
        spare = draw(st.integers(0, 2))
        blocks = [next(ids) for _ in range(-(-(before + new) // BLOCK_TOKENS) + spare)]
        tokens = draw(st.lists(st.integers(0, 99), min_size=new, max_size=new))
        found.append(Row(tokens, before + elsewhere, blocks, before + new, draw(st.booleans())))
    return found


@given(rows())
def test_a_batch_lists_every_new_token_with_its_place(given_rows):
    batch = make_batch(given_rows, BLOCK_TOKENS)
    start = 0
    ends = {}
    for index, caller in enumerate(batch.order):
        row, held = given_rows[caller], given_rows[caller].num_local_tokens
        count = len(row.token_ids)
        assert (count == 1) == (index < batch.num_decode_rows)
        span = slice(start, start + count)
        assert batch.token_ids[span].tolist() == list(row.token_ids)
        assert batch.positions[span].tolist() == list(range(row.position, row.position + count))
        places = [(row.block_ids[i // BLOCK_TOKENS], i % BLOCK_TOKENS) for i in range(held - count, held)]
        assert batch.slots[span].tolist() == [block * BLOCK_TOKENS + offset for block, offset in places]
        assert batch.block_table[index, : len(row.block_ids)].tolist() == list(row.block_ids)
        assert (batch.num_kv_tokens[index], batch.causal_offset[index]) == (held, held - count)
        start += count
        ends[caller] = start - 1
    assert start == batch.num_tokens
    assert batch.logits_index.tolist() == [ends[i] for i, row in enumerate(given_rows) if row.wants_logits]
    counts = [len(given_rows[i].token_ids) for i in batch.order[batch.num_decode_rows :]]
    assert batch.prefill_start.diff().tolist() == counts


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row([1, 2, 3, 4, 5], 0, [0]), "5 KV tokens, 5 of them new, in 1 blocks of 4"),
        (Row([1, 2], 6, [0], num_kv_tokens=1), "1 KV tokens, 2 of them new"),
        (Row([], 6, [0, 1]), "at least one new token"),
    ],
)
def test_rows_that_do_not_fit_their_blocks_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        make_batch([row], BLOCK_TOKENS)
