"""Our logits against `transformers` on the same random weights: prefill, prefill in chunks, decode, mixed batches."""

import pytest
import torch
from model_tools import (
    BLOCK_TOKENS,
    FAMILIES,
    load,
    nan_pool,
    random_ids,
    reference_logits,
    reference_model,
    run_chunks,
    step,
)

from infreal.model import Row

TOLERANCE = 1e-4
BLOCKS = [9, 2, 7, 0, 11, 4, 3, 8, 1, 10, 5]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    model = reference_model(request.param)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return model, load(path)


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "chunks", [[40], [16, 24], [3, 1, 13, 1, 1, 6, 15], [1] * 40], ids=["whole", "chunks", "mixed", "decode"]
)
def test_a_request_in_any_chunks_has_the_logits_of_transformers(pair, chunks):
    model, decoder = pair
    ids = random_ids(40, seed=1)
    ends = torch.tensor(chunks).cumsum(0) - 1
    expected = reference_logits(model, ids)[ends]
    assert expected.std() > 0.1, "a test on flat logits could not fail"
    assert close(run_chunks(decoder, ids, chunks, BLOCKS), expected)


def test_decode_rows_and_prefill_chunks_share_an_iteration(pair):
    model, decoder = pair
    texts = [random_ids(n, seed=n) for n in (19, 6, 25, 9)]
    tables, pool = [BLOCKS[:5], [12, 13], [14, 15, 16, 17, 18, 19, 20], [21, 22, 23]], nan_pool(decoder, 24)
    done = [18, 0, 12, 8]  # before the shared iteration: decode, whole prefill, second chunk, decode
    before = [Row(text[:n], 0, table) for text, n, table in zip(texts, done, tables, strict=True) if n]
    step(decoder, before, pool)
    rows = [Row(text[n:], n, table) for text, n, table in zip(texts, done, tables, strict=True)]
    rows[2] = Row(rows[2].token_ids, rows[2].position, rows[2].block_ids, wants_logits=False)
    logits = step(decoder, rows, pool)
    expected = [reference_logits(model, text)[-1] for text in texts]
    assert close(logits, torch.stack([expected[0], expected[1], expected[3]]))


def test_what_lies_outside_a_requests_slots_is_left_alone(pair):
    _, decoder = pair
    pool = nan_pool(decoder, 4)
    step(decoder, [Row([5, 6, 7, 8, 9], 0, [2, 0])], pool)
    written = ~pool.isnan()
    assert written[2].all() and written[0, :, :, 0].all()
    assert not written[0, :, :, 1:].any() and not written[1].any() and not written[3].any()
    assert BLOCK_TOKENS == 4
