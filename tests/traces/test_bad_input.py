"""Bad input of every kind gives one line that names file, line, column and value, whatever the format."""

import gzip
import os

import pytest

import traces
from perfmodel.errors import InputError
from traces import GenerateOptions, LoadOptions

CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:15:46.68,374,44\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
MOON = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n'
BAILIAN = MOON.replace("{", '{"chat_id": 1, "parent_chat_id": -1, "turn": 1, ')

CASES = {
    "empty file": ("azure-2023", "", "is empty"),
    "only blank lines": ("azure-2023", "\n \n", "is empty"),
    "header alone": ("azure-2023", CSV, "no request left; 0 rows read"),
    "wrong format named": (
        "azure-2023",
        VIDUR + "0,1,1\n",
        "line 1: no column 'TIMESTAMP' (columns: arrived_at, num_prefill",
    ),
    "the right format is hinted at": ("azure-2023", VIDUR + "0,1,1\n", "it looks like format vidur"),
    "JSON given as CSV": ("azure-2023", MOON, "no column 'TIMESTAMP'"),
    "CSV given as JSON": (
        "mooncake",
        CSV + GOOD,
        "line 1: 'TIMESTAMP,ContextTokens,GeneratedTokens' is not a JSON object; it looks like format azure-2023",
    ),
    "missing column": ("azure-2023", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n", "no column 'GeneratedTokens'"),
    "doubled column": ("azure-2023", "TIMESTAMP,ContextTokens,GeneratedTokens,contexttokens\n", "appears twice"),
    "unparsable time": (
        "azure-2023",
        CSV + GOOD * 3 + "yesterday,5,5\n",
        "line 5, column TIMESTAMP: 'yesterday' is not a time",
    ),
    "impossible date": (
        "azure-2023",
        CSV + GOOD + "2023-02-30 18:15:46,5,5\n",
        "line 3, column TIMESTAMP: '2023-02-30 18:15:46'",
    ),
    "date only": ("azure-2023", CSV + "2023-02-28,5,5\n", "line 2, column TIMESTAMP: '2023-02-28' is not a time"),
    "year out of range": (
        "azure-2023",
        CSV + "9999-01-01 00:00:00,5,5\n",
        "line 2, column TIMESTAMP: '9999-01-01 00:00:00'",
    ),
    "naive and aware times": (
        "azure-2024",
        CSV + GOOD + "2023-11-16 18:15:46Z,5,5\n",
        "line 3, column TIMESTAMP: '2023-11-16 18:15:46Z'",
    ),
    "negative length": (
        "azure-2023",
        CSV + GOOD + "2023-11-16 18:15:47,-5,5\n",
        "line 3, column ContextTokens: '-5' is not a whole number",
    ),
    "length in words": (
        "azure-2023",
        CSV + GOOD + "\n2023-11-16 18:15:47,5,many\n",
        "line 4, column GeneratedTokens: 'many'",
    ),
    "fractional length": ("azure-2023", CSV + "2023-11-16 18:15:47,5.5,5\n", "line 2, column ContextTokens: '5.5'"),
    "length missing": ("azure-2023", CSV + "2023-11-16 18:15:47,,5\n", "line 2, column ContextTokens: ''"),
    "huge length": ("azure-2023", CSV + "2023-11-16 18:15:47,99999999999999999999,5\n", "line 2, column ContextTokens"),
    "length not a number": ("azure-2023", CSV + "2023-11-16 18:15:47,nan,5\n", "line 2, column ContextTokens: 'nan'"),
    "too few fields": ("azure-2023", CSV + GOOD + "2023-11-16 18:15:47,5\n", "line 3: 2 fields, the header has 3"),
    "too many fields": ("azure-2023", CSV + "2023-11-16 18:15:47,5,6,7\n", "line 2: 4 fields, the header has 3"),
    "negative time": ("vidur", VIDUR + "-1.5,5,5\n", "line 2, column arrived_at: '-1.5' is not a finite number"),
    "infinite time": ("vidur", VIDUR + "inf,5,5\n", "line 2, column arrived_at: 'inf' is not a finite number"),
    "binary file": ("azure-2023", b"\x7fELF\x00\x01" + bytes(range(256)), "line 1: byte 0x00; not a text file"),
    "binary later on": ("azure-2023", CSV.encode() + GOOD.encode() + b"2023\x00", "line 3: byte 0x00"),
    "not UTF-8": ("azure-2023", CSV.encode() + b"caf\xe9,1,1\n", "line 2: byte 0xe9 is not UTF-8"),
    "UTF-16": ("azure-2023", CSV.encode("utf-16"), "text is UTF-16; UTF-8 is needed"),
    "damaged gzip": ("azure-2023", gzip.compress((CSV + GOOD * 99).encode())[:-20], "damaged gzip file"),
    "gzip of nothing much": ("azure-2023", b"\x1f\x8b rubbish", "damaged gzip file"),
    "broken JSON": ("mooncake", MOON + '{"timestamp": 1,\n', "line 2: '{\"timestamp\": 1,' is not a JSON object"),
    "JSON that is no object": ("mooncake", MOON + "[1, 2]\n", "line 2: '[1, 2]' is not a JSON object"),
    "JSON of depth": ("mooncake", "[" * 100_000 + "\n", "line 1: '[[[["),
    "missing field": ("mooncake", '{"timestamp": 1}\n', "line 1: no field 'input_length' (fields: timestamp)"),
    "field of another format": ("bailian", MOON, "line 1: no field 'chat_id'"),
    "length is a text": (
        "mooncake",
        MOON.replace("5", '"5"', 1),
        "line 1, field input_length: '5' is not a whole number",
    ),
    "length is true": (
        "mooncake",
        MOON.replace("5", "true", 1),
        "line 1, field input_length: True is not a whole number",
    ),
    "time is null": ("mooncake", MOON.replace("0", "null", 1), "line 1, field timestamp: None is not a number"),
    "hashes do not cover": (
        "mooncake",
        MOON + MOON.replace("5", "513", 1),
        "line 2, field hash_ids: 1 blocks of 512 tokens do not cover an input of 513",
    ),
    "hashes cover too much": (
        "bailian",
        BAILIAN.replace("[1]", "[1, 2]"),
        "field hash_ids: 2 blocks of 16 tokens do not cover",
    ),
    "hashes are texts": (
        "mooncake",
        MOON.replace("[1]", '["a"]'),
        "field hash_ids: ['a'] is not a list of whole numbers",
    ),
    "own without times": ("own", "input_tokens,output_tokens\n1,1\n", "no column 'arrival_s'"),
    "own with users but no think": (
        "own",
        "arrival_s,input_tokens,output_tokens,users\n0,1,1,3\n",
        "users and think_s come together",
    ),
    "own with changing users": (
        "own",
        "arrival_s,input_tokens,output_tokens,users,think_s\n0,1,1,3,0\n0,1,1,4,0\n",
        "column users: must be the same on every row",
    ),
    "own with odd blocks": (
        "own",
        "arrival_s,input_tokens,output_tokens,prefix_blocks\n0,1,1,a b\n",
        "line 2, column prefix_blocks: 'a b'",
    ),
    "damaged Parquet": ("own", b"PAR1" + b"x" * 50, "damaged Parquet file"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_that_says_what_and_where(write, name):
    fmt, content, expected = CASES[name]
    path = write(content)
    with pytest.raises(InputError) as caught:
        traces.load(fmt, path)
    message = str(caught.value)
    assert expected in message
    assert str(path) in message or path.name in message
    assert "\n" not in message
    assert len(message) < 500


def test_the_line_is_right_far_into_a_file_of_many_blocks(write, monkeypatch):
    monkeypatch.setattr("traces.files.BLOCK_BYTES", 100)
    with pytest.raises(InputError, match="line 60, column ContextTokens: 'x'"):
        traces.load("azure-2023", write(CSV + GOOD * 58 + "2023-11-16 18:15:47,x,5\n" + GOOD * 50))


def test_naive_and_aware_times_in_different_blocks(write, monkeypatch):
    monkeypatch.setattr("traces.files.BLOCK_BYTES", 100)
    rows = GOOD * 20 + "2023-11-16 18:15:46.68Z,374,44\n" * 20
    with pytest.raises(InputError, match=r"line \d+, column TIMESTAMP: .*(naive and aware|lack)"):
        traces.load("azure-2023", write(CSV + rows))


def test_a_line_without_end_is_refused_in_bounded_memory(write, monkeypatch):
    monkeypatch.setattr("traces.files.MAX_LINE_BYTES", 1000)
    monkeypatch.setattr("traces.files.BLOCK_BYTES", 300)
    with pytest.raises(InputError, match="line 1: longer than"):
        traces.load("mooncake", write("x" * 5000))


def test_paths_that_are_no_file(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        traces.load("azure-2023", tmp_path / "absent.csv")
    with pytest.raises(InputError, match="is a folder, a file is needed"):
        traces.load("azure-2023", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a regular file"):
        traces.load("azure-2023", tmp_path / "pipe")
    with pytest.raises(InputError, match="format servegen needs a folder"):
        traces.load("servegen", tmp_path / "absent")
    with pytest.raises(InputError, match=r"no file chunk-\*-trace.csv"):
        traces.load("servegen", tmp_path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"window_s": (5, 5)}, r"window_s: \[5, 5\) is empty"),
        ({"window_s": (1, 2, 3)}, "window_s: needs two numbers"),
        ({"window_s": (-1, 2)}, "window_s: -1 is not"),
        ({"num_requests": 0}, "num_requests: 0 is not an integer ≥ 1"),
        ({"num_requests": True}, "num_requests: True is not an integer"),
        ({"rate_rps": 0.0}, "rate_rps: 0.0 is not > 0"),
        ({"rate_rps": float("nan")}, "rate_rps: nan is not a number"),
        ({"rate_rps": float("inf")}, "rate_rps: inf is not > 0 and finite"),
        ({"max_context_tokens": 1}, "max_context_tokens: 1 is not an integer ≥ 2"),
        ({"over_long": "clip"}, "unknown over_long 'clip' .known: clip_input, drop, error"),
        ({"seed": -1}, "seed: -1 is not an integer ≥ 0"),
    ],
)
def test_options_of_loaders(options, expected):
    with pytest.raises(InputError, match=expected):
        LoadOptions(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"output": "chatty"}, "unknown output split 'chatty'; did you mean 'chat'"),
        ({"arrivals": "poison"}, "unknown arrivals 'poison'; did you mean 'poisson'"),
        ({"cv": 2.0}, "cv: arrivals poisson do not take it"),
        ({"arrivals": "gamma", "cv": 0.0}, "cv: 0.0 is not > 0"),
        ({"arrivals": "closed"}, "users: arrivals closed need it"),
        ({"users": 5}, "users: arrivals closed need it, others do not take it"),
        ({"arrivals": "saturated", "rate_rps": 4.0}, "rate_rps: arrivals saturated do not take it"),
        ({"think_s": 1.0}, "think_s: only arrivals closed take it"),
        ({"arrivals": "piecewise"}, "profile: arrivals piecewise need it"),
        ({"arrivals": "piecewise", "profile": ((5, 1),)}, "profile: starts must ascend from 0"),
        ({"arrivals": "piecewise", "profile": ((0, 1), (5, 0))}, "the last share is 0"),
        ({"arrivals": "piecewise", "profile": ((0, 1, 2),)}, "profile: a step is"),
        ({"depth": 1.0}, r"depth: 1.0 is not in \[0, 1\)"),
    ],
)
def test_options_of_generators(options, expected):
    with pytest.raises(InputError, match=expected):
        GenerateOptions(**options)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("paper-9", {}, "unknown generator 'paper-9'; did you mean 'paper-8'"),
        ("paper-0", {}, "rate_rps: arrivals poisson need a rate"),
        ("paper-0", {"params": {"x": 1}}, "unknown parameter 'params.x'"),
        ("empirical-azure-conv", {"output": "chat"}, "draws its own output lengths"),
        ("fixed", {"output": "chat"}, "has an output_tokens of its own"),
        ("fixed", {"params": {"input_tokens": 5}}, "params.output_tokens: is needed"),
        ("fixed", {"params": {"input_tokens": 5, "output_tokens": 0}}, "params.output_tokens: 0 is not an integer ≥ 1"),
        ("lognormal", {"params": {"max_tokens": 100}}, "either mean_tokens and sd_tokens, or mu and sigma"),
        ("lognormal", {"params": {"max_tokens": 100, "mean_tokens": 200, "sd_tokens": 5}}, "params.mean_tokens: 200"),
        ("lognormal", {"params": {"max_tokens": 100, "mean_tokens": 50, "sd_tokens": 60}}, "no truncated log-normal"),
        ("lognormal", {"params": {"max_tokens": 100, "mu": 40, "sigma": 1}}, "lies outside"),
        ("lognormal", {"params": {"max_tokens": 100, "mu": 4, "sigma": 0}}, "params.sigma: 0 is not > 0"),
        ("lognormal", {"params": {"max_tokens": "9", "mu": 4, "sigma": 1}}, "params.max_tokens: '9' is not a number"),
        (
            "loguniform-mix",
            {"params": {"max_tokens": 9, "mu": 2, "sigma": 1, "tail_max_tokens": 5}},
            "is not above max_tokens",
        ),
        ("paper-3", {"rate_rps": 1.0, "max_context_tokens": 1000}, "generator paper-3, row"),
    ],
)
def test_generators(name, options, expected):
    with pytest.raises(InputError, match=expected):
        traces.generate(name, GenerateOptions(**options))
