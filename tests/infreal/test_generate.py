"""Generation with one instance: greedy against `transformers`, sampling, stopping, wrong input; SmolLM2 as the slow test."""

import json
from dataclasses import replace

import pytest
import torch
from model_tools import SIZES, load, random_ids, reference_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from infreal import generate as generate_module
from infreal.generate import GenerateOptions, generate, generate_ids, main, picker, stream_text
from infreal.model import ModelError, config_from_hf, load_decoder, open_checkpoint, random_decoder
from infreal.model.tokenizer import byte_characters
from infreal.model.weights import RandomWeights
from perfmodel.errors import InputError

CONFIG = SIZES | {"model_type": "llama", "torch_dtype": "float32"}
OPTIONS = GenerateOptions(max_tokens=12, backend="torch", device="cpu")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A random model whose 256 first tokens are the bytes."""
    path = tmp_path_factory.mktemp("model")
    source = RandomWeights(config_from_hf(CONFIG, "test"), seed=1)
    save_file({name: source.read(name) for name in source.shapes()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    ids = {char: byte for byte, char in byte_characters().items()} | {f"Ġ{i}": i for i in range(256, 300)}
    library = Tokenizer(models.BPE(ids, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.save(str(path / "tokenizer.json"))
    return path


def test_greedy_tokens_are_those_of_transformers(tmp_path):
    model = reference_model("llama")
    model.save_pretrained(tmp_path)
    ids = random_ids(21, seed=4)
    expected = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, 21), max_new_tokens=20, do_sample=False, eos_token_id=-1
    )
    assert list(generate_ids(load(tmp_path), ids, max_tokens=20)) == expected[0, 21:].tolist()


def test_the_size_of_the_chunks_changes_no_token(monkeypatch):
    decoder, ids = random_decoder(config_from_hf(CONFIG, "test"), seed=0), random_ids(40, seed=1)
    whole = list(generate_ids(decoder, ids, max_tokens=10))
    monkeypatch.setattr(generate_module, "CHUNK_TOKENS", 7)
    assert list(generate_ids(decoder, ids, max_tokens=10)) == whole


def test_generation_ends_at_a_stop_token_which_is_not_shown():
    decoder = random_decoder(config_from_hf(CONFIG, "test"), seed=0)
    tokens = list(generate_ids(decoder, [1, 2, 3], max_tokens=10))
    assert len(tokens) == 10
    stop = tokens[4]
    assert list(generate_ids(decoder, [1, 2, 3], max_tokens=10, stop_ids=[stop])) == tokens[: tokens.index(stop)]


def test_the_command_streams_what_the_loop_generates(model_path, capsys):
    assert generate(str(model_path), "hello", OPTIONS) == 0
    checkpoint = open_checkpoint(model_path)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.stop_ids == (7,)
    ids = generate_ids(load_decoder(checkpoint), list(b"hello"), max_tokens=12, stop_ids=(7,))
    text = capsys.readouterr().out
    assert text == "".join(tokenizer.stream(ids)) + "\n"
    assert len(text) > 3


def test_the_prompt_is_checked_before_the_weights_are_read(model_path, monkeypatch):
    monkeypatch.setattr(generate_module, "load_decoder", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(InputError, match="more than the model's context"):
        stream_text(open_checkpoint(model_path), "a" * 250, OPTIONS)


def test_generation_config_names_the_stop_tokens(model_path, tmp_path):
    for file in model_path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert open_checkpoint(tmp_path).tokenizer().stop_ids == (3, 5)


def test_sampling_follows_seed_temperature_and_top_p():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))

    def draws(**changes) -> list[int]:
        pick = picker(replace(OPTIONS, **changes))
        return [pick(logits) for _ in range(2000)]

    assert set(draws()) == {0}
    assert draws(temperature=1.0, seed=1) == draws(temperature=1.0, seed=1) != draws(temperature=1.0, seed=2)
    shares = torch.bincount(torch.tensor(draws(temperature=1.0)), minlength=4) / 2000
    assert torch.allclose(shares, logits.exp(), atol=0.05)
    assert set(draws(temperature=1.0, top_p=0.7)) == {0, 1}
    assert set(draws(temperature=1.0, top_p=0.01)) == {0}
    assert draws(temperature=0.2).count(0) > 1700


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ("hello", {"max_tokens": 0}, "--max-tokens: 0"),
        ("hello", {"temperature": -1.0}, "--temperature: -1.0"),
        ("hello", {"top_p": 0.0}, "--top-p: 0.0"),
        ("hello", {"backend": "tritn"}, "unknown backend 'tritn'; did you mean 'triton'"),
        ("hello", {"device": "cuda:99"}, "--device: 'cuda:99' is not here"),
        ("hello", {"device": "gpu"}, "--device: 'gpu' is not here"),
        ("hello", {"dtype": "float8"}, "unknown dtype 'float8'"),
        ("hello", {"max_tokens": 300}, "5 tokens of prompt and --max-tokens 300 are more than the model's context of 256"),
        ("", {}, "--prompt: no token in it"),
        ("a\udcff", {}, "prompt: .* is not Unicode text"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(model_path, capsys, prompt, changes, message):
    with pytest.raises(InputError, match=message) as error:
        generate(str(model_path), prompt, replace(OPTIONS, **changes))
    assert "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


def test_the_command_ends_with_2_and_one_line(model_path, capsys):
    assert main(["--model", str(model_path), "--prompt", "hello", "--max-tokens", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out
    assert main(["--model", "nothing", "--prompt", "hello"]) == 2
    assert capsys.readouterr().err == (
        "infreal generate: model 'nothing' is not there (allowed: a Hugging Face directory, a .gguf file, or smollm2)\n"
    )
    with pytest.raises(SystemExit, match="2"):
        main(["--model", "nothing"])
    assert capsys.readouterr().err == "infreal generate: the following arguments are required: --prompt\n"


def test_what_is_wrong_with_a_model_is_wrong_input(tmp_path):
    with pytest.raises(InputError, match=r"config\.json: No such file"):
        generate(str(tmp_path), "hello", OPTIONS)


def test_triton_without_a_gpu_is_refused(model_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="--backend triton: no CUDA device here"):
        generate(str(model_path), "hello", replace(OPTIONS, backend="triton"))


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2):
    tokenizer, decoder = smollm2
    ids = tokenizer.encode("The capital of France is")
    assert tokenizer.decode(list(generate_ids(decoder, ids, max_tokens=2))) == " Paris."


@pytest.mark.slow
def test_smollm2_answers_in_its_chat_format_and_stops(smollm2):
    tokenizer, decoder = smollm2
    prompt = "<|im_start|>user\nWhat is the capital of France? Answer in one word.<|im_end|>\n<|im_start|>assistant\n"
    stop = tokenizer.stop_ids
    tokens = list(generate_ids(decoder, tokenizer.encode(prompt), max_tokens=30, stop_ids=stop))
    assert "Paris" in tokenizer.decode(tokens)
    assert len(tokens) < 30


@pytest.mark.slow
def test_smollm2_lacks_some_bytes(smollm2):
    with pytest.raises(ModelError, match="byte 0x04"):
        smollm2[0].encode("\x04")
