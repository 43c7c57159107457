"""Names, mappings and Hugging Face configurations; and the one line each wrong input gets."""

import json

import pytest

from experiments import catalogue
from experiments.catalogue import load_engine, load_gpu, load_link, load_model
from experiments.hf_config import model_from_config
from perfmodel.errors import InputError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "torch_dtype": "float16",
}


@pytest.mark.parametrize("kind", ["MODELS", "GPUS", "LINKS", "ENGINES"])
def test_every_entry_has_one_line_and_loads(kind):
    load = {"MODELS": load_model, "GPUS": load_gpu, "LINKS": load_link, "ENGINES": load_engine}[kind]
    listing = getattr(catalogue, kind)
    assert listing
    for name, line in listing.items():
        assert line and "\n" not in line
        assert load(name).name == name


def test_dtype_and_kv_dtype_override_the_models_own():
    assert load_model("llama2-7b").dtype_bytes == 2
    wide = load_model("llama2-7b", "float32")
    assert (wide.dtype_bytes, wide.kv_dtype_bytes) == (4, 4)
    mixed = load_model("llama2-7b", "float32", "bfloat16")
    assert (mixed.dtype_bytes, mixed.kv_dtype_bytes) == (4, 2)
    with pytest.raises(InputError, match="dtype: 'int4'"):
        load_model("llama2-7b", "int4")


def test_config_json_by_file_or_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for path in (folder, folder / "config.json"):
        model = load_model(str(path))
        assert model.name == "my-model"
        assert model.num_params == load_model("llama2-7b").num_params


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_served_model_types(model_type):
    assert model_from_config("m", LLAMA | {"model_type": model_type}, "m").model_type == model_type


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_local_experts": 8}, "num_local_experts: 8 .mixture of experts"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "num_experts: 128"),
        ({"kv_lora_rank": 512}, "kv_lora_rank: 512 .multi-head latent"),
        ({"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}, "sliding_window: 4096"),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "sliding_window: 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: sliding_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"model_type": "gpt2"}, "model_type: 'gpt2' .allowed: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type: None"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_size": -1}, "hidden_size: -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers: True"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5"),
        ({"torch_dtype": "int8"}, "torch_dtype: 'int8'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes'"),
    ],
)
def test_what_is_not_served_is_one_line_naming_the_field(change, field):
    with pytest.raises(InputError, match=field) as error:
        model_from_config("m", LLAMA | change, "path/config.json")
    assert str(error.value).startswith("path/config.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2", "sliding_window": 4096},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 32768, "max_position_embeddings": 32768},
    ],
)
def test_an_inactive_sliding_window_changes_nothing(change):
    assert model_from_config("m", LLAMA | change, "m").num_layers == 32


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size"])
def test_a_missing_field_is_named(missing):
    config = {key: value for key, value in LLAMA.items() if key != missing}
    with pytest.raises(InputError, match=f"{missing} is missing"):
        model_from_config("m", config, "m")


def test_unknown_names_give_the_nearest():
    with pytest.raises(InputError, match="did you mean 'llama2-7b'"):
        load_model("llama-7b")
    with pytest.raises(InputError, match="unknown gpu 'a100'; did you mean 'a100-"):
        load_gpu("a100")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "line 1: not JSON"), ("[]", "a JSON object is expected"), (None, "cannot read config.json")],
)
def test_unreadable_config(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_model(str(path))


def test_a_mapping_changes_single_values():
    link = load_link({"preset": "nvlink3", "bytes_per_s": 1e9})
    assert link.bytes_per_s == 1e9
    assert link.latency_s == load_link("nvlink3").latency_s
    assert load_gpu({"preset": "a100-80gb", "memory_bytes": 10**9}).memory_bytes == 10**9
    assert load_engine({"preset": "eager-2023", "row_s": 0}).row_s == 0
    assert load_engine({"preset": "graphs", "splits_all_heads": True}).splits_all_heads


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"bytes_per_s": 1e9}, "a mapping names its preset"),
        ({"preset": "nvlink9"}, "unknown link 'nvlink9'"),
        ({"preset": "nvlink3", "byte_per_s": 1e9}, "did you mean 'bytes_per_s'"),
        ({"preset": "nvlink3", "bytes_per_s": "fast"}, "link.bytes_per_s: 'fast'"),
        ({"preset": "nvlink3", "bytes_per_s": -1.0}, "link.bytes_per_s: -1.0"),
        ({"preset": "nvlink3", "per_node": 1}, "link.per_node: 1"),
    ],
)
def test_a_wrong_mapping_is_one_line(mapping, message):
    with pytest.raises(InputError, match=message):
        load_link(mapping)
