"""A model cut over the ranks of an instance: logits and tokens of the whole, each rank reading no more than its part."""

import shutil

import pytest
import torch
from group_tools import run_group
from model_tools import FAMILIES, SIZES, nan_pool, random_ids, step

from infreal.model import ModelError, Row, config_from_hf, load_decoder, open_checkpoint, random_decoder
from infreal.model.shard import Shard, allowed_sizes
from infreal.model.weights import RandomWeights, tensor_shapes
from perfmodel.layout import allowed_tensor_parallel
from perfmodel.specs import ModelSpec

TOLERANCE = 1e-4
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "vocab_size": 301}
NAMES = ("llama", "llama-biases", "qwen2", "qwen3", "qwen3-biases")


def config_of(name, **changes):
    model_type, family = FAMILIES[name]
    fields = {"model_type": model_type, "max_position_embeddings": 256} | SIZES | family | HEADS | changes
    return config_from_hf(fields, name)


def run(decoder):
    """Three requests: prefill in chunks beside decode rows, then greedy tokens. Whole logits of each iteration, and the tokens."""
    texts = [random_ids(n, seed=n) for n in (21, 9, 1)]
    tables, done, pool = [[3, 0, 8, 4, 9, 1, 10], [2, 5, 11, 12], [6, 7]], [0, 0, 0], nan_pool(decoder, 13)
    seen = []
    for new in ((16, 9, 0), (3, 1, 1), (2, 1, 1), (1, 1, 1), (1, 1, 1)):
        rows, who = [], []
        for i, count in enumerate(new):
            if count:
                rows.append(Row(texts[i][done[i] : done[i] + count], done[i], tables[i]))
                who.append(i)
                done[i] += count
        logits = step(decoder, rows, pool)
        for i, token in zip(who, decoder.next_tokens(logits).tolist(), strict=True):
            if done[i] == len(texts[i]):
                texts[i].append(token)
        seen.append(decoder.whole_logits(logits).clone())
    return torch.cat(seen), texts


def check_ranks(make, size):
    """make(group or nothing) → decoder; of all ranks against one alone."""
    logits, texts = run(make())
    assert logits.std() > 0.1, "a test on flat logits could not fail"
    for own, own_texts in run_group(size, lambda group: run(make(group=group))):
        assert torch.allclose(own, logits, atol=TOLERANCE, rtol=TOLERANCE)
        assert own_texts == texts


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_have_the_logits_and_tokens_of_the_whole(name, size):
    config = config_of(name)
    check_ranks(lambda **group: random_decoder(config, 3, **group), size)


def test_kv_heads_are_copied_where_there_are_fewer_than_ranks():
    config = config_of("llama", num_key_value_heads=2)
    assert [Shard(config, rank, 4).kv_heads for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    check_ranks(lambda **group: random_decoder(config, 3, **group), 4)


def test_the_first_of_equal_tokens_wins_wherever_they_lie():
    config = config_of("llama")

    def tokens(group):
        decoder = random_decoder(config, 0, group=group)
        first, end = decoder.shard.vocabulary
        rows = torch.zeros(4, 301)
        rows[1, [80, 200, 299]] = 1.0
        rows[2, [150, 149]] = 1.0  # two ranks' last and first
        rows[3, 300] = 1.0
        return decoder.next_tokens(rows[:, first:end]).tolist()

    assert run_group(2, tokens) == [[0, 80, 149, 300]] * 2


def test_shards_are_slices_of_the_whole():
    """Together they are the whole, each element once (KV heads as often as they are copied, norms on every rank)."""
    config = config_of("qwen3-biases", num_key_value_heads=2)
    source = RandomWeights(config, 1)
    for name, shape in tensor_shapes(config).items():
        times = torch.zeros(shape)
        for rank in range(4):
            shard = Shard(config, rank, 4)
            part = source.read(name, shard.part(name))
            assert part.equal(source.read(name)[shard.part(name)])
            if name in tensor_shapes(shard.config):
                assert tuple(part.shape) == tensor_shapes(shard.config)[name]
            times[shard.part(name)] += 1
        is_whole = "norm" in name or name.endswith("o_proj.bias")
        assert times.unique().tolist() == [4 if is_whole else 2 if ".k_proj" in name or ".v_proj" in name else 1], name


def test_sizes_are_refused_in_one_line_and_as_the_simulator_refuses_them():
    config = config_of("llama", num_attention_heads=12, num_key_value_heads=2, hidden_size=96)
    with pytest.raises(ModelError) as refused:
        Shard(config, 0, 3)
    line = "tensor_parallel: 3 ranks do not divide 12 heads, 2 KV heads, 80 MLP columns (allowed: [1, 2, 4])"
    assert str(refused.value) == line
    for heads, kv_heads, columns in ((8, 4, 80), (12, 2, 96), (9, 3, 1536), (14, 2, 4864), (32, 32, 11008), (6, 6, 7)):
        changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": columns}
        config = config_of("llama", head_dim=8, **changes)
        sizes = {name: getattr(config, name) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads")}
        sizes |= {name: getattr(config, name) for name in ("head_dim", "intermediate_size", "vocab_size")}
        assert allowed_sizes(config) == allowed_tensor_parallel(ModelSpec("m", "llama", **sizes))


def saved(config_name, folder, **changes):
    """A directory whose tensors lie in three files behind an index."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model_type, family = FAMILIES[config_name]
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | family | HEADS | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def test_two_ranks_load_a_directory_of_several_files_and_read_only_their_parts(tmp_path):
    path = saved("llama", tmp_path / "model", tie_word_embeddings=False, initializer_range=0.2)
    check_ranks(lambda **group: load_decoder(open_checkpoint(path), torch.float32, **group), 2)

    def numel_read(group):
        checkpoint, numel = open_checkpoint(path), 0
        read = checkpoint.read

        def counted(name, part=()):
            nonlocal numel
            tensor = read(name, part)
            numel += tensor.numel()
            return tensor

        checkpoint.read = counted
        load_decoder(checkpoint, torch.float32, group=group)
        return numel, checkpoint

    shares = run_group(2, numel_read)
    shapes = shares[0][1].shapes()
    whole = sum(torch.Size(shape).numel() for shape in shapes.values())
    norms = sum(torch.Size(shape).numel() for name, shape in shapes.items() if "norm" in name)
    assert sum(numel for numel, _ in shares) == whole + norms, "norms are on both, all else on one"


def test_errors_stay_one_clear_line(tmp_path):
    path = saved("llama", tmp_path / "model")
    shard = sorted(path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    group = type("Second", (), {"rank": 1, "size": 2})()
    for damage, message in ((whole[:-100], "not a readable safetensors file"), (None, "is not there")):
        shard.write_bytes(damage) if damage else shard.unlink()
        with pytest.raises(ModelError, match=message) as error:
            load_decoder(open_checkpoint(path), torch.float32, group=group)
        assert "\n" not in str(error.value)
    shutil.rmtree(path)
