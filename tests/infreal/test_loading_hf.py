"""Hugging Face directories: round trips, shards, and one clear line for each thing that can be wrong."""

import json
import shutil

import pytest
import torch
from model_tools import SIZES, nan_pool, random_ids, reference_logits, reference_model, step
from safetensors.torch import load_file, save_file

from infreal.model import ModelError, Row, config_from_hf, load_decoder, open_checkpoint, random_decoder
from infreal.model import weights as weights_module
from infreal.model.weights import RandomWeights, load_weights, tensor_shapes

CONFIG = SIZES | {"model_type": "llama", "torch_dtype": "float32"}
IDS = random_ids(9, 5)


def logits_of(path) -> torch.Tensor:
    decoder = load_decoder(open_checkpoint(path))
    return step(decoder, [Row(IDS, 0, [0, 2, 1])], nan_pool(decoder, 3))[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with random weights, written without transformers."""
    path = tmp_path_factory.mktemp("saved")
    source = RandomWeights(config_from_hf(CONFIG, "test"), seed=1)
    save_file({name: source.read(name) for name in source.shapes()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of it to break."""
    return shutil.copytree(saved, tmp_path / "model")


def change_tensors(path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def change_config(path, **changes) -> None:
    fields = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(fields))


def check_refused(path, *parts: str) -> None:
    with pytest.raises(ModelError) as error:
        load_decoder(open_checkpoint(path))
    line = str(error.value)
    assert "\n" not in line and len(line) < 400
    assert all(part in line for part in (str(path), *parts)), line


def test_what_was_written_is_what_is_computed_with(saved):
    decoder = random_decoder(config_from_hf(CONFIG, "test"), seed=1)
    expected = step(decoder, [Row(IDS, 0, [0, 2, 1])], nan_pool(decoder, 3))[0]
    assert torch.equal(logits_of(saved), expected)


def test_shards_give_the_logits_of_transformers(tmp_path):
    model = reference_model("llama-biases")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert torch.allclose(logits_of(tmp_path), reference_logits(model, IDS)[-1], atol=1e-4)
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    check_refused(tmp_path, "model.safetensors.index.json", "model-00001-of", "not there")


def test_the_dtype_is_the_files_or_the_callers(copy):
    change_config(copy, torch_dtype="bfloat16")
    assert load_decoder(open_checkpoint(copy)).dtype == torch.bfloat16
    assert load_decoder(open_checkpoint(copy), torch.float32).dtype == torch.float32


def test_weights_do_not_follow_the_file_after_loading(copy):
    decoder = load_decoder(open_checkpoint(copy))
    before = decoder.weights.final_norm.clone()
    with (copy / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\xff" * size)
    assert torch.equal(decoder.weights.final_norm, before)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "gpt2"}, ("model_type: 'gpt2'", "allowed: llama, mistral, qwen2, qwen3")),
        ({"model_type": "lama"}, ("did you mean 'llama'",)),
        ({"num_local_experts": 8}, ("num_local_experts: mixture of experts",)),
        ({"quantization_config": {"bits": 4}}, ("quantization_config: quantised weights",)),
        ({"mlp_bias": True}, ("mlp_bias",)),
        ({"hidden_act": "gelu"}, ("hidden_act: 'gelu' (allowed: silu)",)),
        ({"model_type": "mistral", "sliding_window": 64}, ("sliding_window: 64",)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ("rope_scaling: 'yarn' (allowed: default, linear",)),
        ({"rope_scaling": {"type": "linear"}}, ("factor is missing",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor: 0.5",)),
        ({"num_key_value_heads": 4}, ("6 query heads are no multiple of 4 KV heads",)),
        ({"hidden_size": "48"}, ("hidden_size: '48' (allowed: a whole number",)),
        ({"intermediate_size": None}, ("intermediate_size is missing",)),
        ({"torch_dtype": "int8"}, ("dtype: 'int8'",)),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings: 'yes'",)),
        ({"intermediate_size": 96}, ("mlp.gate_proj.weight has shape [80, 48]; config says [96, 48]",)),
        ({"num_hidden_layers": 4}, ("model.layers.3.", "is missing (and 8 more)")),
        ({"num_hidden_layers": 2}, ("model.layers.2.", "no place in this architecture")),
        ({"attention_bias": True}, ("q_proj.bias is missing",)),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_its_field(copy, changes, parts):
    change_config(copy, **changes)
    check_refused(copy, *parts)


def test_a_window_as_long_as_the_context_is_no_window(copy):
    change_config(copy, model_type="mistral", sliding_window=256)
    assert logits_of(copy).isfinite().all()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop("model.norm.weight"), ("tensor model.norm.weight is missing",)),
        (lambda t: t.update(extra=torch.zeros(2)), ("tensor extra has no place",)),
        (lambda t: t.update({"model.norm.weight": torch.ones(47)}), ("has shape [47]; config says [48]",)),
        (lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}), ("dtype I8 (allowed: F64",)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(copy, change, parts):
    change_tensors(copy, change)
    check_refused(copy, *parts)


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_refused(copy, kept_bytes):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    check_refused(copy, "model.safetensors: not a readable safetensors file")


def test_files_that_are_not_there_or_not_json_are_named(copy, tmp_path):
    check_refused(tmp_path / "nothing", "allowed: a Hugging Face directory, a .gguf file, or smollm2")
    (copy / "config.json").write_text("{")
    check_refused(copy, "config.json: not JSON")
    (copy / "config.json").unlink()
    check_refused(copy, "config.json: No such file")


def test_pickled_weights_are_named_and_never_read(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    check_refused(copy, "pytorch_model.bin is a pickle, and pickles are never read")


def test_more_than_the_machine_has_is_refused_before_anything_is_read(saved, monkeypatch):
    monkeypatch.setattr(weights_module, "available_bytes", lambda device: 100_000)
    check_refused(saved, "weights in float32 take 0.000", "0.0001 GB are available on cpu")


def test_available_memory_is_that_of_this_machine():
    available = weights_module.available_bytes(torch.device("cpu"))
    assert 1 << 20 < available < 1 << 50
    huge = config_from_hf(CONFIG | {"vocab_size": 1 << 40}, "test")
    with pytest.raises(ModelError, match="random weights: weights in float32 take"):
        load_weights(huge, RandomWeights(huge, 0), torch.float32, "cpu")


def test_random_weights_follow_the_seed_and_keep_activations_near_one():
    config = config_from_hf(CONFIG | {"attention_bias": True}, "test")
    first, again, other = (RandomWeights(config, seed) for seed in (3, 3, 4))
    for name in tensor_shapes(config):
        assert torch.equal(first.read(name), again.read(name))
        assert not torch.equal(first.read(name), other.read(name))
    decoder = random_decoder(config, seed=3)
    logits = step(decoder, [Row(IDS, 0, [0, 1, 2])], nan_pool(decoder, 3))
    assert 0.3 < logits.std() < 3
