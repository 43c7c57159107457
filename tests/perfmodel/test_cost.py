"""The time of an iteration: composition, bounds and monotony under every pack, pipeline stages, MicroAttention, scales."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.catalogue import load_engine, load_gpu, load_link, load_model
from experiments.packs import cost_model
from perfmodel.basis import Basis
from perfmodel.breakdown import iteration_bytes, iteration_flops, parts, roofline_s
from perfmodel.collectives import all_reduce_s
from perfmodel.cost import SCALE_KEYS, Batch, CostModel
from perfmodel.errors import InputError
from perfmodel.messages import StartIterations
from perfmodel.pricing import Surroundings, price_step
from perfmodel.specs import InstanceSpec

GPUS = {"a100-80gb": "a100", "h100-80gb": "h100", "h200-141gb": "h200"}


@cache
def make(model="llama2-7b", gpu="a100-80gb", tp=1, pp=1, engine="graphs", pack=None, scale=()) -> CostModel:
    spec = load_gpu(gpu)
    links = load_link(spec.link), load_link("ethernet-100g")
    instance = InstanceSpec(load_model(model), spec, load_engine(engine), *links, tp, pp)
    instance.check()
    return cost_model(instance, pack, dict(scale))


@st.composite
def costs(draw):
    """Any shipped pack, or none; MHA and GQA; a rank to a whole node; stages; MHA split along its KV or not (engine)."""
    gpu = draw(st.sampled_from(sorted(GPUS)))
    pack = draw(st.sampled_from([None, "analytic"]))
    model, tp = draw(
        st.sampled_from([("llama2-7b", 1), ("llama2-7b", 4), ("llama2-70b", 2), ("llama2-70b", 8), ("qwen2.5-0.5b", 1)])
    )
    engine = draw(st.sampled_from(["graphs", "eager-2023"]))
    return make(model, gpu, tp, draw(st.sampled_from([1, 1, 2])), engine, pack)


counts = st.integers(1, 3000)
contexts = st.integers(1, 400_000)


@settings(deadline=None)
@given(costs(), counts, counts)
def test_kernels_are_monotone_in_tokens_and_rows(cost, few, more):
    few, more = sorted((few, few + more))
    for a, b in zip(cost.iteration_terms(few, few, few), cost.iteration_terms(more, more, more), strict=True):
        assert a <= b * (1 + 1e-12)


@settings(deadline=None)
@given(costs(), st.integers(1, 600), st.integers(0, 600), contexts, contexts)
@example(make("llama2-7b", tp=4, pp=2), 2, 1, 60_000, 1)
@example(make("llama2-70b", "h200-141gb", 8, 2), 32, 1, 60_000, 1)
def test_decode_attention_is_monotone_in_rows_and_context(cost, rows, more_rows, context, more_context):
    """More rows of the same context, or the same rows with more of it, never take less time."""
    one = cost.decode_attention_s(rows, rows * context)
    assert one <= cost.decode_attention_s(rows, rows * context + more_context) * (1 + 1e-12)
    assert one <= cost.decode_attention_s(rows + more_rows, (rows + more_rows) * context) * (1 + 1e-12)


@settings(deadline=None)
@given(costs(), st.integers(1, 4096), st.integers(0, 200_000), st.integers(0, 4096), st.integers(0, 200_000))
def test_prefill_attention_is_monotone_in_tokens_and_prefix(cost, tokens, prefix, more_tokens, more_prefix):
    one = cost.prefill_attention_s(tokens, prefix)
    assert one <= cost.prefill_attention_s(tokens + more_tokens, prefix) * (1 + 1e-12)
    assert one <= cost.prefill_attention_s(tokens, prefix + more_prefix) * (1 + 1e-12)


@settings(deadline=None)
@given(costs(), st.integers(1, 300), st.integers(0, 100_000), st.integers(0, 50), st.integers(0, 100_000))
def test_micro_attention_is_monotone_and_never_cheaper_than_attention(cost, rows, kv_tokens, more_rows, more_tokens):
    served = cost.micro_attention_s(rows, kv_tokens)
    assert served >= cost.decode_attention_s(rows, kv_tokens)
    assert served <= cost.micro_attention_s(rows, kv_tokens + more_tokens) * (1 + 1e-12)
    assert served <= cost.micro_attention_s(rows + more_rows, kv_tokens + more_rows * kv_tokens) * (1 + 1e-12)


@st.composite
def batches(draw):
    rows = draw(st.lists(st.integers(1, 200_000), max_size=40))
    chunks = draw(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 100_000)), max_size=3))
    if not (rows or chunks):
        rows = [1]
    return rows, Batch(len(rows), sum(rows), max(rows, default=0), tuple(chunks))


def total_s(cost: CostModel, batch: Batch) -> float:
    return sum(part.s for part in parts(cost, batch).values())


@settings(deadline=None)
@given(costs(), batches())
def test_no_iteration_is_faster_than_the_hardware(cost, drawn):
    """Time ≥ FLOPs at the peak, ≥ bytes at the peak bandwidth; packs or not, and whatever the batch."""
    _, batch = drawn
    instance = cost.instance
    assert total_s(cost, batch) >= roofline_s(instance, batch)
    peak = instance.num_gpus * instance.gpu.memory_bytes_per_s
    assert total_s(cost, batch) >= iteration_bytes(instance, batch) / peak
    assert total_s(cost, batch) >= iteration_flops(instance, batch) / (
        instance.num_gpus * instance.gpu.peak_flops_per_s
    )


@settings(deadline=None)
@given(costs(), batches())
def test_a_batch_costs_at_least_its_longest_row_alone(cost, drawn):
    rows, batch = drawn
    for context in {*rows[:1], max(rows, default=0)} - {0}:
        assert total_s(cost, batch) >= total_s(cost, Batch(1, context, context)) * (1 - 1e-12)


@settings(deadline=None)
@given(costs(), st.lists(contexts, min_size=1, max_size=40), st.integers(1, 20_000))
def test_iterations_at_once_are_the_sum_of_single_ones(cost, rows, iterations):
    """Macro steps rest on it, across floors, bends and the row that becomes the slowest."""
    alone = Surroundings(0.0, lambda peer: cost.instance.inter_link, lambda peer: 0.0)

    def total_s(first: int, count: int) -> float:
        tokens = sum(rows) + first * len(rows)
        step = StartIterations(1, len(rows), tokens, max(rows) + first, (), count, (), ())
        return price_step(cost, step, alone).time.total_s(count)

    some = sorted({0, iterations // 3, iterations // 2, iterations})
    parts_s = [total_s(first, after - first) for first, after in pairwise(some)]
    assert total_s(0, iterations) == pytest.approx(sum(parts_s), rel=1e-9)
    batch = Batch(len(rows), sum(rows), max(rows))
    assert total_s(0, 1) == pytest.approx(sum(part.s for part in parts(cost, batch).values()), rel=1e-9)


def test_permutation_of_chunks_changes_nothing():
    cost = make()
    chunks = ((512, 0), (64, 9000), (2048, 100))
    assert total_s(cost, Batch(chunks=chunks)) == pytest.approx(total_s(cost, Batch(chunks=chunks[::-1])), rel=1e-15)


@pytest.mark.parametrize(
    ("model", "tp", "measured_ms"),
    [
        ("llama2-7b", 1, {1: 9.3, 64: 9.7, 256: 17.8, 1024: 67.9}),
        ("llama2-70b", 8, {1: 14.2, 64: 15.2, 256: 30.4, 1024: 92.4}),
    ],
)
def test_non_attention_time_of_whole_models_on_a100(model, tp, measured_ms):
    """simulators.md, from Vidur's measurements; what the pack is off by lies within its band and the engine's small kernels."""
    for tokens, time_ms in measured_ms.items():
        for pack in (None, "analytic"):
            assert make(model, tp=tp, pack=pack).kernel_terms(tokens)[0] == pytest.approx(time_ms * 1e-3, rel=0.13)


def test_eager_engine_of_2023():
    """Public decode times of LLaMA2-70B on 8 A100, short prompts (simulators.md), in ms by batch."""
    cost = make("llama2-70b", tp=8, engine="eager-2023")
    for rows, time_ms in {1: 43, 4: 45, 16: 50, 32: 53, 64: 72}.items():
        assert total_s(cost, Batch(rows, rows * 128)) == pytest.approx(time_ms * 1e-3, rel=0.11)


def test_all_reduce_beyond_a_node_is_paid_on_the_slower_link():
    instance = make("llama2-7b", tp=8).instance
    wide = replace(instance, tensor_parallel=32)
    law = make("llama2-7b", tp=8).curves.all_reduce
    inside, across = (all_reduce_s(law, spec, 2e6) for spec in (instance, wide))
    ring = 2 * 3 / 4 * 2e6 / instance.inter_link.bytes_per_s
    assert across - inside == pytest.approx(ring + 6 * instance.inter_link.latency_s)
    own_card = replace(wide, inter_link=load_link("infiniband-200g"))
    ring = 2 * 3 / 4 * 2e6 / (8 * own_card.inter_link.bytes_per_s)
    assert all_reduce_s(law, own_card, 2e6) - inside == pytest.approx(ring + 6 * own_card.inter_link.latency_s)


def test_one_rank_reduces_nothing():
    assert make().kernel_terms(64)[1] == 0.0


def test_pipeline_stages_trade_latency_for_memory():
    """Two stages: two micro-batches of half the rows, each through half the layers twice, and a hop for each."""
    one, two = make("llama2-70b", tp=4), make("llama2-70b", tp=4, pp=2)
    instance = two.instance
    hop_s = 2 * instance.intra_link.transfer_s(32 * 8192 * 2 / 4)
    collectives_s = one.kernel_terms(32)[1] + hop_s
    assert two.kernel_terms(64)[1] == pytest.approx(collectives_s)
    embedding_s = two.times.embedding_s(32)
    assert two.kernel_terms(64)[0] == pytest.approx(one.kernel_terms(32)[0] + embedding_s)
    assert two.decode_attention_terms(64) == pytest.approx(one.decode_attention_terms(32).times(1.0, 0.5))
    assert two.prefill_attention_s(512, 100) == pytest.approx(one.prefill_attention_s(512, 100) / 2)
    assert two.head_s(64) == pytest.approx(2 * one.head_s(32))


def test_wire_bytes_of_a_layer():
    """Q in 16 bit out; MA, m and e in fp32 back. 2,048 queries of LLaMA2-7B are 16 MB a layer (design.md §3)."""
    cost = make()
    assert cost.query_bytes(2048) == 2048 * 4096 * 2
    assert cost.partial_bytes(1) == 32 * (128 + 2) * 4


def test_remote_prefix_has_no_mask():
    """A chunk's own triangle is causal; its MA on a remote prefix meets every KV token."""
    cost = make()
    assert cost.prefill_micro_attention_s(2048, 2048) > cost.prefill_attention_s(2048, 0)
    assert cost.prefill_micro_attention_s(2048, 0) == 0.0


@pytest.mark.parametrize("key", SCALE_KEYS)
def test_a_scale_multiplies_its_part_and_no_other(key):
    plain, scaled = (make("llama2-70b", tp=8, scale=scale) for scale in ((), ((key, 3.0),)))
    link, batch = plain.instance.inter_link, Batch(8, 8 * 20_000, 20_000, ((512, 1000),))
    before, after = (parts(cost, batch) for cost in (plain, scaled))
    for name, part in before.items():
        assert after[name].s == pytest.approx(part.s * (3.0 if name == key else 1.0)), name
    moved = scaled.transfer_s(1e6, link) / plain.transfer_s(1e6, link)
    assert moved == pytest.approx(3.0 if key == "transfer" else 1.0)


def test_prefill_and_decode_attention_scale_apart():
    """simulators.md, "a changed profile is seen": all decode times × 10 → predicted decode attention × 10."""
    plain, slow = make(), make(scale=(("decode_attention", 10.0),))
    assert slow.decode_attention_s(8, 80_000) == pytest.approx(10 * plain.decode_attention_s(8, 80_000))
    assert slow.micro_attention_s(8, 80_000) == pytest.approx(10 * plain.micro_attention_s(8, 80_000))
    assert slow.prefill_attention_s(512, 0) == plain.prefill_attention_s(512, 0)


@pytest.mark.parametrize(
    ("scale", "message"), [({"decode": 2.0}, "unknown scale 'decode'"), ({"host": 0.0}, "scale.host: 0.0")]
)
def test_wrong_scales(scale, message):
    with pytest.raises(InputError, match=message):
        CostModel(make().instance, make().curves, scale)


def test_nothing_costs_nothing():
    cost = make()
    assert cost.kernel_terms(0) == (0.0, 0.0)
    assert cost.head_s(0) == 0.0
    assert cost.decode_attention_s(0, 0) == 0.0
    assert cost.prefill_attention_s(0, 100) == 0.0


def test_basis_says_how_each_term_is_known():
    measured = make("llama2-70b", tp=8)
    assert measured.decode_basis(8, 8 * 1024) == Basis.MEASURED
    assert measured.decode_basis(8, 8 * 1000) == Basis.INTERPOLATED
    assert measured.decode_basis(8, 8 * 200_000) == Basis.EXTRAPOLATED
    assert measured.prefill_basis(2048, 0) == Basis.MEASURED
    assert measured.prefill_basis(2048, 4096) == Basis.EXTRAPOLATED
    assert measured.kernels_basis(64) == Basis.INTERPOLATED
    assert measured.kernels_basis(20_000) == Basis.EXTRAPOLATED
    analytic = make("llama2-70b", tp=8, pack="analytic")
    assert set(analytic.iteration_basis(64, 64, 64_000)) == {Basis.ANALYTIC}


def test_host_is_known_as_far_as_the_engine_was_fitted():
    eager = make("llama2-70b", tp=8, engine="eager-2023")
    assert [eager.host_basis(rows) for rows in (64, 65)] == [Basis.INTERPOLATED, Basis.EXTRAPOLATED]
    assert make().host_basis(1) == Basis.ANALYTIC


def test_heads_that_were_not_measured_say_so():
    """LLaMA2-13B has 40 KV heads: no source has; H100 has none above 8."""
    assert make("llama2-13b").decode_basis(8, 8 * 1024) == Basis.EXTRAPOLATED
    assert make("llama2-7b", "h100-80gb").decode_basis(8, 8 * 1024) == Basis.EXTRAPOLATED
    assert make("llama2-7b").decode_basis(8, 8 * 1024) == Basis.INTERPOLATED
