"""Tokens per second of one instance against `transformers` generate: the same random model of SmolLM2's shape, one run.

fp32, two threads, 512-token prompts, batch 1 and 8, prefill and decode apart; rounds alternate, medians are compared.
"""

import statistics
import time

import pytest
import torch

from infreal.model import Row, config_from_hf, make_batch, random_decoder
from infreal.model.loading import SMOLLM2_SHAPE
from infreal.model.weights import RandomWeights

PROMPT_TOKENS, NEW_TOKENS, BLOCK_TOKENS, ROUNDS = 512, 32, 16, 3
CONFIG, SEED = config_from_hf(SMOLLM2_SHAPE, "SmolLM2's shape"), 0


@pytest.fixture(scope="module")
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(two_threads):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    source = RandomWeights(CONFIG, SEED)
    config = transformers.AutoConfig.for_model(**SMOLLM2_SHAPE)
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    reference = reference.to_empty(device="cpu").eval()
    reference.load_state_dict({name: source.read(name) for name in source.shapes()}, strict=False)
    reference.tie_weights()
    reference.generation_config.eos_token_id = None
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)  # its buffer is no part of the state
    return random_decoder(CONFIG, SEED), reference


def run_ours(decoder, prompts: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Seconds of prefill (one iteration of all prompts) and of decode, and the new tokens `[rows, NEW_TOKENS]`."""
    rows, blocks_per_row = len(prompts), -(-(PROMPT_TOKENS + NEW_TOKENS) // BLOCK_TOKENS)
    tables = [range(i * blocks_per_row, (i + 1) * blocks_per_row) for i in range(rows)]
    pool = decoder.new_pool(rows * blocks_per_row, BLOCK_TOKENS)

    def step(new, position):
        batch = make_batch([Row(ids, position, table) for ids, table in zip(new, tables, strict=True)], BLOCK_TOKENS)
        return decoder.forward(batch, decoder.local_attention(batch, pool, "torch")).argmax(1)

    started_s = time.perf_counter()
    tokens = [step(prompts.tolist(), 0)]
    prefilled_s = time.perf_counter()
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS - 1):
        tokens.append(step(tokens[-1].unsqueeze(1).tolist(), position))
    return prefilled_s - started_s, time.perf_counter() - prefilled_s, torch.stack(tokens, 1)


class Clock:
    """A stopping criterion that stops nothing: notes when each token was there."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def run_transformers(model, prompts: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """The same of `generate`."""
    clock, started_s = Clock(), time.perf_counter()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "stopping_criteria": [clock]}
    tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    first_s, last_s = clock.times_s[0], clock.times_s[-1]
    return first_s - started_s, last_s - first_s, tokens[:, PROMPT_TOKENS:]


@pytest.mark.bench
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rows", [1, 8])
def test_one_instance_is_not_slower_than_transformers(models, rows):
    decoder, reference = models
    prompts = torch.randint(CONFIG.vocab_size, (rows, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    rounds = [(run_ours(decoder, prompts), run_transformers(reference, prompts)) for _ in range(ROUNDS)]
    assert all(torch.equal(ours[2], theirs[2]) for ours, theirs in rounds), "not the same tokens"
    tokens = {"prefill": rows * PROMPT_TOKENS, "decode": rows * (NEW_TOKENS - 1)}
    ratios = {}
    for index, (phase, count) in enumerate(tokens.items()):
        ours_s, theirs_s = (statistics.median(r[side][index] for r in rounds) for side in (0, 1))
        ratios[phase] = theirs_s / ours_s
        rates = f"{count / ours_s:8.1f} tok/s, transformers {count / theirs_s:8.1f}"
        print(f"\nbatch {rows} {phase:7s}: {rates}, ratio {ratios[phase]:.2f}", end="")
    assert min(ratios.values()) >= 1, ratios
