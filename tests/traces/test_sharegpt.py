"""ShareGPT conversations: lengths by a tokenizer, every turn accounted for."""

import hashlib
import json
import sys

import pytest

import traces
from perfmodel.errors import InputError
from traces import LoadOptions

CHATS = [
    {"id": "a", "conversations": [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three four five"}]},
    {
        "id": "b",
        "conversations": [
            {"from": "system", "value": "be brief"},
            {"from": "human", "value": "one"},
            {"from": "gpt", "value": "two three"},
            {"from": "human", "value": "four five six"},
            {"from": "gpt", "value": "seven"},
            {"from": "human", "value": "and now"},
        ],
    },
    {"id": "c", "conversations": []},
    {"id": "d", "conversations": [{"from": "gpt", "value": "I speak first"}]},
    {"id": "e", "conversations": [{"from": "human", "value": "hello"}]},
    {"id": "f", "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": ""}]},
]


def load(path, tokenizer, **options):
    return traces.load("sharegpt", path, LoadOptions(tokenizer=str(tokenizer), **options))


def test_turns_histories_and_the_account(write, word_tokenizer):
    trace = load(write(json.dumps(CHATS)), word_tokenizer)
    assert trace.ids.tolist() == ["a/1", "b/1", "b/2"]
    assert trace.input_tokens.tolist() == [2, 2 + 1, 2 + 1 + 2 + 3]
    assert trace.output_tokens.tolist() == [3, 2, 1]
    assert trace.session.tolist() == [0, 1, 1]
    assert trace.turn.tolist() == [1, 1, 2]
    assert trace.account.dropped == {"no_reply": 2, "no_human_message": 2, "zero_output": 1}
    assert trace.account.rows_read == 8
    assert trace.is_saturated
    assert hashlib.sha256(word_tokenizer.read_bytes()).hexdigest() in trace.account.notes[0]
    assert load(write(json.dumps(CHATS)), word_tokenizer, rate_rps=3.0).duration_s > 0


def test_pieces_and_layouts_do_not_matter(write, word_tokenizer, monkeypatch):
    whole = load(write(json.dumps(CHATS)), word_tokenizer)
    monkeypatch.setattr("traces.files.BLOCK_BYTES", 13)
    monkeypatch.setattr("traces.formats.sharegpt.CHUNK_CONVERSATIONS", 2)
    for text in (json.dumps(CHATS, indent=3), " \n" + json.dumps(CHATS) + "\n\n"):
        trace = load(write(text), word_tokenizer)
        assert trace.input_tokens.tolist() == whole.input_tokens.tolist()
        assert trace.account.as_dict() == whole.account.as_dict()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "not a JSON list"),
        ("[]", "is empty"),
        ("{}", "after entry 0: not a JSON list of conversations"),
        ("[1]", "entry 1: no list 'conversations'"),
        ('[{"conversations": []}', "after entry 1: not a JSON list"),
        ('[{"conversations": []},]', "after entry 1: not a JSON list"),
        ('[{"conversations": []}] x', "after entry 1: not a JSON list"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 1, message 1: needs the texts 'from' and 'value'"),
    ],
)
def test_other_json(write, word_tokenizer, content, expected):
    with pytest.raises(InputError, match=expected):
        load(write(content), word_tokenizer)


def test_tokenizer_is_needed_and_must_be_one(write, tmp_path):
    path = write(json.dumps(CHATS))
    with pytest.raises(InputError, match=r"tokenizer: format sharegpt needs a tokenizer.json"):
        traces.load("sharegpt", path)
    pytest.importorskip("tokenizers")
    with pytest.raises(InputError, match=r"not a tokenizer.json"):
        load(path, tmp_path / "absent.json")


def test_without_the_library_one_line_says_what_to_install(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match="need the library tokenizers; pip install"):
        load(write(json.dumps(CHATS)), "tokenizer.json")
