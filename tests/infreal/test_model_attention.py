"""The seam of a layer's attention: parts of a request's KV in other pools give the logits of one pool (S9)."""

import random

import pytest
import torch
from model_tools import BLOCK_TOKENS, SIZES, nan_pool, random_ids, step

from infreal.kernels import Partial, merge, micro_attention, prefill_micro_attention
from infreal.model import ModelConfig, Row, config_from_hf, make_batch, random_decoder

SEEDS = range(6)


def config(**changes) -> ModelConfig:
    return config_from_hf(SIZES | {"model_type": "llama", "num_hidden_layers": 2} | changes, "test")


class SpreadAttention:
    """DistAttention for one request without a network: some of its sealed blocks lie in the pool of a creditor."""

    def __init__(self, local, remote_pool, remote_blocks, num_queries) -> None:
        self.local, self.pool, self.num_queries = local, remote_pool, num_queries
        self.table = torch.tensor([remote_blocks], dtype=torch.int32)
        self.tokens = torch.tensor([len(remote_blocks) * BLOCK_TOKENS], dtype=torch.int32)

    def __call__(self, layer, q, k, v):
        parts = Partial.empty((2, *q.shape), q.device)
        self.local.write(layer, k, v)
        self.local.partial(layer, q, parts[0])
        options = {"layer": layer, **self.local.options}
        if self.num_queries == 1:
            micro_attention(q, self.pool, self.table, self.tokens, out=parts[1], **options)
        else:
            start = torch.tensor([0, self.num_queries], dtype=torch.int32)
            prefill_micro_attention(q, start, self.pool, self.table, self.tokens, None, out=parts[1], **options)
        return merge(parts, backend=self.local.options["backend"]).output()


def spread_step(decoder, row, pool, remote_pool, remote_blocks):
    batch = make_batch([row], BLOCK_TOKENS)
    local = decoder.local_attention(batch, pool, "torch")
    return decoder.forward(batch, SpreadAttention(local, remote_pool, remote_blocks, len(row.token_ids)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_new", [1, 6], ids=["decode", "prefill"])
def test_any_sealed_blocks_may_lie_elsewhere(seed, num_new):
    decoder, rng = random_decoder(config(), seed), random.Random(seed)
    ids, before = random_ids(40, seed), 34
    blocks, pool = rng.sample(range(12), 10), nan_pool(decoder, 12)
    step(decoder, [Row(ids[:before], 0, blocks)], pool)
    expected = step(decoder, [Row(ids[before : before + num_new], before, blocks)], pool)

    moved = sorted(rng.sample(range(before // BLOCK_TOKENS), rng.randint(1, 8)))
    remote_pool, kept = nan_pool(decoder, 12), [b for i, b in enumerate(blocks) if i not in moved]
    remote_pool[: len(moved)] = pool[[blocks[i] for i in moved]]
    pool[[blocks[i] for i in moved]] = torch.nan
    held = before + num_new - len(moved) * BLOCK_TOKENS
    row = Row(ids[before : before + num_new], before, kept, num_kv_tokens=held)
    actual = spread_step(decoder, row, pool, remote_pool, list(range(len(moved))))
    assert torch.allclose(actual, expected, atol=1e-5, rtol=1e-5), f"seed {seed}"


def test_the_triton_kernels_carry_the_same_model():
    """One layer in the interpreter: a decode row and a prefill chunk."""
    decoder = random_decoder(config(num_hidden_layers=1), seed=3)
    rows = [Row([7], 6, [3, 1]), Row([5, 6, 8], 0, [0])]
    logits = {}
    for backend in ("torch", "triton"):
        pool = nan_pool(decoder, 4)
        step(decoder, [Row(random_ids(6, 1), 0, [3, 1])], pool)
        logits[backend] = step(decoder, rows, pool, backend)
    assert torch.allclose(logits["torch"], logits["triton"], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_models_stay_near_fp32(dtype):
    ids = random_ids(20, 2)
    exact, rounded = (random_decoder(config(), 0, kind) for kind in (torch.float32, dtype))
    logits = [step(d, [Row(ids, 0, range(5))], nan_pool(d, 5)) for d in (exact, rounded)]
    assert logits[1].dtype == torch.float32
    assert (logits[0] - logits[1]).abs().max() < 0.1 * logits[0].std()
