"""Text and token ids: byte-level BPE from a GGUF's fields and from a tokenizer.json; streaming; unknown bytes."""

from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from infreal.model import ModelError
from infreal.model.tokenizer import (
    PRE_TOKENIZERS,
    GgufVocabulary,
    Tokenizer,
    byte_characters,
    load_tokenizer,
    tokenizer_from_gguf,
)

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
CONTROL = "<|end|>"
TOKENS = [CONTROL, *byte_characters().values(), *(merge.replace(" ", "") for merge in MERGES)]
VOCABULARY = GgufVocabulary(
    kind="gpt2",
    pre="smollm",
    tokens=TOKENS,
    token_types=[3] + [1] * (len(TOKENS) - 1),
    merges=MERGES,
    bos_id=0,
    adds_bos=False,
    stop_ids=(0,),
)
TOKENIZER = tokenizer_from_gguf(VOCABULARY, "m.gguf")


def test_byte_characters_are_those_of_the_library():
    assert set(byte_characters().values()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert byte_characters()[ord(" ")] == "Ġ"


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=st.text(max_size=40))
def test_every_text_survives_the_way_there_and_back(pre, text):
    tokenizer = tokenizer_from_gguf(replace(VOCABULARY, pre=pre), "m.gguf")
    ids = tokenizer.encode(text)
    body = ids[1:] if tokenizer.bos_id is not None else ids
    assert tokenizer.library.decode(body, skip_special_tokens=False) == text


@given(st.text(max_size=30).filter(lambda text: CONTROL not in text))
def test_a_stream_is_the_text_in_whole_characters(text):
    ids = TOKENIZER.encode(text)
    assert "".join(TOKENIZER.stream(iter(ids))) == text


def test_text_appears_while_it_is_generated():
    taken = []

    def ids():
        for token_id in TOKENIZER.encode("hi you"):
            taken.append(token_id)
            yield token_id

    assert next(TOKENIZER.stream(ids())) == "h"
    assert len(taken) == 1


def test_a_stream_that_ends_within_a_character_says_so():
    euro = TOKENIZER.encode("a€")
    assert list(TOKENIZER.stream(euro[:-1])) == ["a", "\ufffd"]


def test_merges_apply_and_special_tokens_stay_whole():
    assert [TOKENS[i] for i in TOKENIZER.encode(f"hello w{CONTROL}")] == ["hello", "Ġw", CONTROL]


def test_families_split_digits_differently():
    split = {pre: len(tokenizer_from_gguf(replace(VOCABULARY, pre=pre, adds_bos=False), "m").encode("12")) for pre in
             ("smollm", "qwen2", "gpt-2", "llama-bpe")}  # fmt: skip
    assert split == {"smollm": 2, "qwen2": 2, "gpt-2": 1, "llama-bpe": 1}


@pytest.mark.parametrize(("pre", "adds_bos", "expected"), [
    ("smollm", None, None), ("llama-bpe", None, 0), ("smollm", True, 0), ("llama-bpe", False, None),
])  # fmt: skip
def test_bos_is_put_in_front_where_the_file_or_the_family_does(pre, adds_bos, expected):
    tokenizer = tokenizer_from_gguf(replace(VOCABULARY, pre=pre, adds_bos=adds_bos), "m.gguf")
    assert tokenizer.bos_id == expected
    assert (tokenizer.encode("a")[0] == 0) == (expected == 0)


def test_a_byte_that_the_vocabulary_lacks_is_named():
    tokens = [token for token in TOKENS if token != byte_characters()[0xC0] and token != byte_characters()[4]]
    tokenizer = tokenizer_from_gguf(replace(VOCABULARY, tokens=tokens), "m.gguf")
    assert tokenizer.missing_bytes == {0xC0, 4}
    with pytest.raises(ModelError, match="prompt: byte 0x04 is not in the model's vocabulary"):
        tokenizer.encode("hello\x04")


def test_bytes_that_are_no_text_are_named():
    """An argument that is not UTF-8 reaches Python as a lone surrogate."""
    with pytest.raises(ModelError, match=r"prompt: '\\udcff' at character 2 is not Unicode text"):
        TOKENIZER.encode(b"ab\xff".decode("utf-8", "surrogateescape"))


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_a_character_that_becomes_no_token_is_named(unknown):
    """Without byte tokens, the library drops it or puts the unknown token."""
    vocabulary = {"<unk>": 0, "a": 1, "b": 2}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    tokenizer = Tokenizer(library)
    assert tokenizer.encode("a b") == [1, 2]
    with pytest.raises(ModelError, match="prompt: 'é' at character 3 is not in the model's vocabulary"):
        tokenizer.encode("a bé")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "llama"}, "tokenizer.ggml.model: 'llama' .allowed: gpt2"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre: 'tekken' .allowed: default, gpt-2, smollm"),
        ({"merges": ["h zz"]}, "tokenizer.ggml.merges do not fit"),
    ],
)
def test_vocabularies_that_are_not_served_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(replace(VOCABULARY, **changes), "m.gguf")


def test_a_tokenizer_json_is_read_or_refused(tmp_path):
    TOKENIZER.library.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json", (0,))
    assert loaded.encode("hello w€") == TOKENIZER.encode("hello w€")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ModelError, match=r"broken\.json: not a tokenizer.json"):
        load_tokenizer(tmp_path / "broken.json", ())
    with pytest.raises(ModelError, match=r"nothing\.json: not there"):
        load_tokenizer(tmp_path / "nothing.json", ())
