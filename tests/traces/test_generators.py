"""Generated lengths: targets met, splits exact, streams separate."""

import numpy as np
import pytest

import traces
from traces import GenerateOptions
from traces.generators.context import PAPER_LONGEST, PAPER_SHORT, PAPER_TAIL_FRAC, PAPER_UNIMODAL, PROMPT_HEAVY
from traces.lengths import LogUniform, TruncatedLogNormal, fit_lognormal

# workloads.md, "Our reconstruction of the paper's nine traces": mean and SD of the context, without the pinned request.
TARGETS = {
    "paper-0": (8000, 12000, 60_000),
    "paper-1": (8000, 8000, 60_000),
    "paper-2": (8000, 4000, 60_000),
    "paper-3": (10967, 30900, 200_000),
    "paper-4": (16370, 53767, 400_000),
    "paper-5": (21178, 75409, 600_000),
    "paper-6": (29923, 116738, 1_000_000),
    "paper-7": (39955, 166259, 1_500_000),
    "paper-8": (49392, 214302, 2_000_000),
}
DRAWS = 100_000


def generate(name, **options):
    return traces.generate(name, GenerateOptions(**{"num_requests": 1000, "rate_rps": 1.0, **options}))


@pytest.mark.parametrize("name", ["paper-0", "paper-1", "paper-2"])
def test_truncated_targets_are_met_within_two_percent(name):
    mean, sd, longest = TARGETS[name]
    context = generate(name, num_requests=DRAWS).context_tokens
    assert context.mean() == pytest.approx(mean, rel=0.02)
    assert context.std() == pytest.approx(sd, rel=0.02)
    assert context.max() <= longest


@pytest.mark.parametrize("name", list(PAPER_LONGEST))
def test_short_part_and_whole_of_the_mixtures(name):
    mean, sd, longest = TARGETS[name]
    context = generate(name, num_requests=DRAWS).context_tokens
    short = context[context < PAPER_SHORT.max_tokens]
    assert short.mean() == pytest.approx(2000, rel=0.02)
    assert short.std() == pytest.approx(3000, rel=0.02)
    # With a tail to 2,000K the mean has a standard error of 1.4 % even at 100,000 draws; the exact one is tested below.
    assert context.mean() == pytest.approx(mean, abs=4 * sd / DRAWS**0.5)
    tail_mean = (longest - 32_000) / np.log(longest / 32_000)
    assert (1 - PAPER_TAIL_FRAC) * PAPER_SHORT.mean + PAPER_TAIL_FRAC * tail_mean == pytest.approx(mean, rel=1e-3)
    assert np.count_nonzero(context > 32_000) == pytest.approx(PAPER_TAIL_FRAC * DRAWS, rel=0.05)


def test_parameters_have_the_moments_that_the_document_states():
    for name, shape in PAPER_UNIMODAL.items():
        assert (shape.mean, shape.sd) == pytest.approx(TARGETS[name][:2], rel=1e-3)
    assert (PAPER_SHORT.mean, PAPER_SHORT.sd) == pytest.approx((2000, 3000), rel=1e-3)
    assert (PROMPT_HEAVY.mean, PROMPT_HEAVY.sd) == pytest.approx((256, 256), rel=1e-3)


@pytest.mark.parametrize("num_requests", [1, 2, 17, 5000])
@pytest.mark.parametrize("name", list(PAPER_LONGEST))
def test_exactly_one_request_is_pinned_at_the_longest(name, num_requests):
    context = generate(name, num_requests=num_requests).context_tokens
    assert np.count_nonzero(context == PAPER_LONGEST[name]) == 1
    assert context.max() == PAPER_LONGEST[name]


@pytest.mark.parametrize("name", ["paper-0", "paper-1", "paper-8"])
def test_splits(name):
    context = generate(name).context_tokens
    by_split = {split: generate(name, output=split) for split in ("chat", "balanced", "prompt-heavy", "share-50")}
    for trace in by_split.values():
        assert np.array_equal(trace.context_tokens, context), "a split does not move the context"
        assert trace.input_tokens.min() >= 1
        assert trace.output_tokens.min() >= 1
    assert np.array_equal(by_split["chat"].output_tokens, np.clip(context // 2, 1, 2048))
    assert np.array_equal(by_split["balanced"].output_tokens, np.clip(context // 5, 1, 2048))
    assert np.array_equal(by_split["share-50"].output_tokens, np.maximum(context // 2, 1))
    assert np.all(by_split["prompt-heavy"].output_tokens <= np.minimum(np.maximum(context // 2, 1), 2048))
    assert np.array_equal(generate(name).output_tokens, by_split["balanced"].output_tokens), "the default"


def test_prompt_heavy_output_meets_its_target_where_the_context_leaves_room():
    outputs = generate("paper-2", num_requests=DRAWS, output="prompt-heavy").output_tokens
    assert outputs.mean() == pytest.approx(256, rel=0.02)
    assert outputs.std() == pytest.approx(256, rel=0.03)


def test_shortest_context_is_one_token_in_and_one_out():
    trace = generate("lognormal", params={"mu": 0.0, "sigma": 0.5, "max_tokens": 4}, output="chat")
    assert trace.context_tokens.min() == 2
    assert trace.input_tokens.min() == trace.output_tokens.min() == 1


@pytest.mark.parametrize("name", ["paper-0", "paper-5", "empirical-mooncake-conversation"])
def test_lengths_do_not_move_with_the_rate_and_times_scale_exactly(name):
    one, four = generate(name, rate_rps=1.0), generate(name, rate_rps=4.0)
    bursty = generate(name, rate_rps=4.0, arrivals="gamma", cv=3.0)
    for other in (four, bursty):
        assert np.array_equal(one.input_tokens, other.input_tokens)
        assert np.array_equal(one.output_tokens, other.output_tokens)
    assert np.array_equal(one.arrival_s / 4.0, four.arrival_s)


@pytest.mark.parametrize("name", ["paper-1", "empirical-azure-code"])
def test_the_first_requests_do_not_depend_on_how_many_follow(name):
    few, many = generate(name, num_requests=100), generate(name, num_requests=900)
    for column in ("arrival_s", "input_tokens", "output_tokens"):
        assert np.array_equal(getattr(few, column), getattr(many, column)[:100]), column


def test_of_a_mixture_only_the_pinned_requests_depend_on_the_number():
    few, many = generate("paper-3", num_requests=500), generate("paper-3", num_requests=900)
    moved = np.flatnonzero(few.context_tokens != many.context_tokens[:500])
    assert 1 <= len(moved) <= 2


def test_seeds_seed_and_differ():
    first, same, other = (generate("paper-0", seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.context_tokens, same.context_tokens)
    assert np.array_equal(first.arrival_s, same.arrival_s)
    assert np.mean(first.context_tokens == other.context_tokens) < 0.01
    assert abs(np.corrcoef(first.context_tokens, other.context_tokens)[0, 1]) < 0.15
    assert abs(np.corrcoef(first.context_tokens[1:], np.diff(first.arrival_s))[0, 1]) < 0.15, "streams are independent"


def test_parametric_by_moments_and_by_shape_agree():
    by_moments = generate("lognormal", params={"mean_tokens": 2000, "sd_tokens": 3000, "max_tokens": 32_000})
    by_shape = generate("lognormal", params={"mu": 6.9021, "sigma": 1.2268, "max_tokens": 32_000})
    np.testing.assert_allclose(by_moments.context_tokens, by_shape.context_tokens, rtol=1e-3, atol=1)


def test_loguniform_mix_is_the_papers_family():
    params = {"mu": 6.9021, "sigma": 1.2268, "max_tokens": 32_000, "tail_max_tokens": 200_000}
    mixed, paper = generate("loguniform-mix", params=params), generate("paper-3")
    assert np.count_nonzero(mixed.context_tokens != paper.context_tokens) <= 1, "but for the pinned request"


def test_fixed():
    trace = generate("fixed", params={"input_tokens": 512, "output_tokens": 128})
    assert set(trace.input_tokens.tolist()) == {512}
    assert set(trace.output_tokens.tolist()) == {128}


def test_limits_apply_to_generated_requests_too():
    dropped = generate("paper-3", max_context_tokens=50_000, over_long="drop")
    clipped = generate("paper-3", max_context_tokens=50_000, over_long="clip_input")
    assert dropped.context_tokens.max() <= 50_000
    assert dropped.account.dropped["over_long"] == 1000 - len(dropped) > 0
    assert len(clipped) == 1000
    assert clipped.account.changed["input_clipped"] == dropped.account.dropped["over_long"]
    assert dropped.arrival_s[0] == 0.0


def test_the_nine_say_that_they_are_a_reconstruction():
    assert "a reconstruction: only the range of the context is the paper's" in generate("paper-0").account.notes


@pytest.mark.parametrize(
    ("mean", "sd", "low", "high"),
    [(8000, 12000, 1, 60_000), (256, 256, 1, 2048), (50, 5, 1, 100), (1000, 100, 500, 1e6)],
)
def test_fit_finds_the_moments(mean, sd, low, high):
    shape = fit_lognormal(mean, sd, low, high)
    assert (shape.mean, shape.sd) == pytest.approx((mean, sd), rel=1e-4)


def test_moments_agree_with_integration_of_the_quantiles():
    middles = (np.arange(200_000) + 0.5) / 200_000
    for shape in (TruncatedLogNormal(8.0, 2.0, 1, 60_000), TruncatedLogNormal(2.0, 0.5, 1, 1000)):
        values = shape.quantile(middles)
        assert values.mean() == pytest.approx(shape.mean, rel=1e-3)
        assert values.std() == pytest.approx(shape.sd, rel=2e-3)
        assert np.all(np.diff(values) >= 0)
    assert LogUniform(10, 1000).quantile(np.array([0.0, 0.5, 1.0])) == pytest.approx([10, 100, 1000])
