"""GGUF files written by `gguf.GGUFWriter`: every type, Q/K rows put back in order, metadata, corruption."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from model_tools import nan_pool, random_ids, step

from infreal.model import Decoder, ModelError, Row, config_from_hf, load_decoder, open_checkpoint
from infreal.model.shard import Shard
from infreal.model.weights import RandomWeights, load_weights

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
IDS = random_ids(11, 3, vocab_size=64)


class Source(RandomWeights):
    """Random weights as a file of this type holds them: matrices rounded there and back."""

    kind = Type.F32

    def read(self, name, part=()):
        values = super().read(name)
        if values.ndim < 2 or self.kind == Type.F32:
            return values[part]
        packed = gguf.quantize(values.numpy(), self.kind)
        return torch.from_numpy(np.array(gguf.dequantize(packed, self.kind), dtype=np.float32))[part]


def source(model_type="llama", kind=Type.F32, **changes) -> Source:
    made = Source(config_from_hf(SIZES | {"model_type": model_type} | changes, "test"), seed=2)
    object.__setattr__(made, "kind", kind)
    return made


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py does for Q and K of LLaMA."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(path, made: Source, extra=lambda writer: None) -> None:
    config = made.config
    arch = config.model_type if config.model_type != "mistral" else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    if config.head_dim != config.hidden_size // config.num_heads:
        writer.add_key_length(config.head_dim)
    extra(writer)
    table = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_layers)
    for name in made.shapes():
        values = RandomWeights.read(made, name).numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permuted(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        kind = made.kind if values.ndim == 2 else Type.F32
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(decoder: Decoder) -> torch.Tensor:
    return step(decoder, [Row(IDS, 0, [0, 2, 1])], nan_pool(decoder, 3))[0]


def expected_logits(made: Source) -> torch.Tensor:
    return logits_of(Decoder(made.config, load_weights(made.config, made, torch.float32, "cpu")))


def loaded(path) -> Decoder:
    return load_decoder(open_checkpoint(path), torch.float32)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1], ids=lambda t: t.name)
def test_every_type_gives_the_logits_of_its_rounded_weights(tmp_path, kind):
    made = source(kind=kind)
    write(tmp_path / "m.gguf", made)
    assert torch.allclose(logits_of(loaded(tmp_path / "m.gguf")), expected_logits(made), atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("mistral", {"head_dim": 32}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_every_architecture(tmp_path, model_type, changes):
    made = source(model_type, **changes)
    write(tmp_path / "m.gguf", made)
    assert torch.allclose(logits_of(loaded(tmp_path / "m.gguf")), expected_logits(made), atol=1e-5)


def test_a_rank_gets_its_part_of_what_is_dequantised(tmp_path):
    made = source(kind=Type.Q4_0)
    write(tmp_path / "m.gguf", made)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for name in checkpoint.shapes():
        whole, parts = checkpoint.read(name), [Shard(made.config, rank, 2).part(name) for rank in range(2)]
        assert all(checkpoint.read(name, part).equal(whole[part]) for part in parts)
        assert torch.allclose(whole, made.read(name), atol=1e-6), "Q and K are put back in order before they are cut"


def test_linear_scaling_is_read(tmp_path):
    made = source(rope_scaling={"type": "linear", "factor": 4.0})

    def extra(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    write(tmp_path / "m.gguf", made, extra)
    assert torch.allclose(logits_of(loaded(tmp_path / "m.gguf")), expected_logits(made), atol=1e-5)


def test_the_divisors_of_llama3_are_read(tmp_path):
    """llama.cpp stores Llama 3's scaling as one divisor per frequency."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    made = source(rope_scaling=llama3 | {"original_max_position_embeddings": 32})
    expected = Decoder(made.config, load_weights(made.config, made, torch.float32, "cpu"))
    plain = source()
    divisors = Decoder(plain.config, expected.weights).frequencies / expected.frequencies
    assert divisors.max() > 7.9

    def extra(writer):
        writer.add_tensor("rope_freqs.weight", divisors.numpy())

    write(tmp_path / "m.gguf", made, extra)
    assert torch.allclose(logits_of(loaded(tmp_path / "m.gguf")), logits_of(expected), atol=1e-5)


def check_refused(path, *parts: str) -> None:
    with pytest.raises(ModelError) as error:
        loaded(path)
    line = str(error.value)
    assert "\n" not in line and len(line) < 400
    assert all(part in line for part in (str(path), *parts)), line


def test_a_file_cut_anywhere_is_refused(tmp_path):
    write(tmp_path / "whole.gguf", source())
    whole = (tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [0, 1, 3, 8, 20, *range(24, 3000, 97), len(whole) // 2, len(whole) - 40]:
        path.write_bytes(whole[:size])
        check_refused(path, "not a readable GGUF file")


def test_a_file_with_other_bytes_never_loads_in_silence_or_hangs(tmp_path):
    """Bytes of the header overwritten: the counts and lengths in it may then be enormous."""
    write(tmp_path / "whole.gguf", source())
    whole = bytearray((tmp_path / "whole.gguf").read_bytes())
    path = tmp_path / "broken.gguf"
    for start in [0, 4, 8, 16, 24, 32]:
        broken = bytearray(whole)
        broken[start : start + 8] = b"\xff" * 8
        path.write_bytes(broken)
        check_refused(path, "not a readable GGUF file")


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        (lambda w: w.add_expert_count(8), ("expert_count", "mixture of experts")),
        (lambda w: w.add_sliding_window(32), ("attention.sliding_window",)),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), ("rope.scaling.type: 'yarn'", "none, linear")),
        (lambda w: w.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 2), "f4")), ("blk.0.ffn_gate_exps",)),
        (lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(64, "f4")), ("self_attn.k_proj.bias is missing",)),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path, extra, parts):
    write(tmp_path / "m.gguf", source(), extra)
    check_refused(tmp_path / "m.gguf", *parts)


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    check_refused(tmp_path / "m.gguf", "general.architecture: 'mamba' is not a served architecture")
