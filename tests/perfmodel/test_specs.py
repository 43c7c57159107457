"""Sizes of models, KV capacity, and the layouts a model allows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.catalogue import MODELS, load_engine, load_gpu, load_link, load_model
from perfmodel.errors import InputError
from perfmodel.layout import allowed_tensor_parallel, single_layout
from perfmodel.memory import weight_bytes
from perfmodel.specs import InstanceSpec


def make_instance(model: str = "llama2-7b", gpu: str = "a100-80gb", **sizes) -> InstanceSpec:
    links = load_link("nvlink3"), load_link("ethernet-100g")
    return InstanceSpec(load_model(model), load_gpu(gpu), load_engine("graphs"), *links, **sizes)


PARAMS = {  # as the published checkpoints count them
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-8b": 8_190_735_360,
    "qwen3-0.6b": 596_049_920,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize(("name", "params"), PARAMS.items())
def test_parameters_are_the_checkpoints(name, params):
    assert load_model(name).num_params == params


@pytest.mark.parametrize(
    ("name", "kv_bytes"), [("llama2-7b", 524_288), ("llama2-13b", 819_200), ("llama2-70b", 327_680)]
)
def test_kv_bytes_per_token_are_the_papers(name, kv_bytes):
    assert load_model(name).kv_bytes_per_token == kv_bytes


def test_capacity_of_llama2_7b_before_reserves():
    """simulators.md, "Capacity": (77.31e9 − 13.48e9) / 524,288 = 121.7K tokens before reserves."""
    account = make_instance(reserve_bytes=0).memory_account()
    before = (account["usable_bytes"] - account["weight_bytes"]) / 524_288
    assert before == pytest.approx(121_700, rel=1e-3)
    assert account["kv_bytes"] == before * 524_288 - account["activation_bytes"]


def test_reserve_is_stated_and_configurable():
    default, none = make_instance(), make_instance(reserve_bytes=0)
    lost = none.num_blocks - default.num_blocks
    assert lost == pytest.approx(default.memory_account()["reserve_bytes"] / default.block_bytes, abs=1)


def test_blocks_per_gpu_overrides_the_capacity():
    assert make_instance(blocks_per_gpu=100).num_blocks == 100
    assert make_instance("llama2-70b", blocks_per_gpu=100, tensor_parallel=4, pipeline_parallel=2).num_blocks == 800


def test_kv_heads_are_copied_where_tensor_parallel_exceeds_them():
    plain, copied = (make_instance("llama2-70b", tensor_parallel=tp) for tp in (8, 32))
    assert plain.block_bytes == 16 * 327_680
    assert copied.block_bytes == 4 * 16 * 327_680
    assert copied.memory_account()["kv_head_copies"] == 4


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_one_gpu_are_the_checkpoint(name):
    """TP1, PP1 holds each tensor once; a tied head is not held twice."""
    instance = make_instance(name)
    assert weight_bytes(instance, 0) == instance.model.weight_bytes


@given(name=st.sampled_from(sorted(MODELS)), data=st.data())
def test_shards_hold_the_whole_model(name, data):
    """Over ranks and stages every weight exists, and only norms, copied KV heads, padding and a tied head are extra."""
    model = load_model(name)
    tp = data.draw(st.sampled_from(allowed_tensor_parallel(model)))
    pp = data.draw(st.sampled_from([p for p in (1, 2, 4) if model.num_layers % p == 0]))
    instance = replace(make_instance(name), tensor_parallel=tp, pipeline_parallel=pp)
    total = tp * sum(weight_bytes(instance, stage) for stage in range(pp))
    assert total >= model.weight_bytes
    copies = max(0, tp - model.num_kv_heads) * 2 * model.head_dim * model.hidden_size * model.num_layers
    vectors = tp * (model.num_layers * model.layer_vector_params + model.hidden_size)
    tables = (2 * tp + model.vocab_size) * model.hidden_size
    assert total <= model.weight_bytes + (copies + vectors + tables) * model.dtype_bytes


def test_a_model_that_does_not_fit_is_one_line():
    with pytest.raises(
        InputError, match=r"llama2-70b on a100-80gb .* does not fit: 77.31 GB usable, 137.95 GB weights"
    ) as error:
        _ = make_instance("llama2-70b").num_blocks
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_parallel": 3}, r"tensor_parallel: 3 .*allowed: \[1, 2, 4, 8, 16, 32\]"),
        ({"tensor_parallel": 0}, "tensor_parallel: 0"),
        ({"pipeline_parallel": 5}, r"pipeline_parallel: 5 .*allowed: \[1, 2, 4, 8, 16, 32\]"),
        ({"block_tokens": 0}, "block_tokens: 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: 1.5"),
        ({"blocks_per_gpu": -1}, "blocks_per_gpu: -1"),
        ({"reserve_bytes": -1}, "reserve_bytes: -1"),
    ],
)
def test_wrong_sizes_name_what_is_allowed(sizes, message):
    with pytest.raises(InputError, match=message):
        make_instance(**sizes).check()


@pytest.mark.parametrize(
    ("model", "num_gpus", "layout"),
    [
        ("llama2-7b", 32, (32, 1)),
        ("llama2-13b", 32, (8, 4)),
        ("llama2-70b", 32, (32, 1)),
        ("qwen2.5-7b", 8, (4, 2)),
        ("smollm2-135m", 2, (1, 2)),
    ],
)
def test_single_layout_is_the_largest_tensor_parallel(model, num_gpus, layout):
    assert single_layout(load_model(model), num_gpus) == layout


def test_single_layout_that_cannot_exist_is_refused():
    with pytest.raises(InputError, match="7 GPUs cannot hold one llama2-7b"):
        single_layout(load_model("llama2-7b"), 7)


def test_links_share_a_card_per_node_or_have_one_each():
    ethernet, infiniband = load_link("ethernet-100g"), load_link("infiniband-200g")
    assert ethernet.group_bytes_per_s(8) == ethernet.bytes_per_s
    assert infiniband.group_bytes_per_s(8) == 8 * infiniband.bytes_per_s


def test_paper_link_is_125_mb_per_s():
    assert load_link("ethernet-1g").bytes_per_s == 125e6
