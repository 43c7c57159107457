"""Whatever a file holds, a loader gives a workload or one line: never a traceback, never a hang."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import traces
from perfmodel.errors import InputError
from traces.catalogue import READERS

FILE_FORMATS = sorted(name for name, reader in READERS.items() if not reader.is_folder and name != "sharegpt")
HEADERS = {
    "azure-2023": "TIMESTAMP,ContextTokens,GeneratedTokens",
    "azure-2024": "TIMESTAMP,ContextTokens,GeneratedTokens",
    "azure-2025": "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
    "burstgpt": "Timestamp,Session ID,Request tokens,Response tokens",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens",
    "own": "arrival_s,input_tokens,output_tokens,id,session,prefix_blocks,users,think_s",
}
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids", "chat_id", "parent_chat_id", "turn")
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def outcome(fmt, path):
    """A workload that keeps its invariants (checked when it is built), or one line."""
    try:
        trace = traces.load(fmt, path)
    except InputError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 700, message
        return None
    assert trace.account.rows_read == len(trace) + sum(trace.account.dropped.values())
    return trace


cells = (
    st.integers(-5, 2**70).map(str)
    | st.floats().map(str)
    | st.datetimes().map(str)
    | st.datetimes().map(lambda time: time.isoformat() + "Z")
    | st.text(max_size=12)
    | st.sampled_from(
        ["", '"', "NULL", "NaN", "1_000", "１", "+5", " 7", "0x10", "1e3", "-0", "2023-11-16 18:15:46.6805900"]
    )
)


@pytest.mark.parametrize("fmt", FILE_FORMATS)
@quick
@given(content=st.binary(max_size=300))
def test_any_bytes(fmt, tmp_path, content):
    path = tmp_path / "bytes"
    path.write_bytes(content)
    outcome(fmt, path)
    path.write_bytes(gzip.compress(content))
    outcome(fmt, path)


@pytest.mark.parametrize("fmt", sorted(HEADERS))
@quick
@given(
    rows=st.lists(st.lists(cells, min_size=1, max_size=9), max_size=6), newline=st.sampled_from(["\n", "\r\n", "\n\n"])
)
def test_any_cells_under_a_good_header(fmt, tmp_path, rows, newline):
    path = tmp_path / "cells.csv"
    width = HEADERS[fmt].count(",") + 1
    lines = [HEADERS[fmt], *(",".join((row * width)[:width]) for row in rows)]
    path.write_bytes(newline.join(lines).encode("utf-8", "surrogatepass"))
    outcome(fmt, path)


numbers = st.integers(-2, 2000) | st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=4)
objects = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, numbers | st.lists(numbers, max_size=4)))


@pytest.mark.parametrize("fmt", ["mooncake", "bailian"])
@quick
@given(rows=st.lists(objects | numbers, max_size=5))
def test_any_objects(fmt, tmp_path, rows):
    path = tmp_path / "objects.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    outcome(fmt, path)


good_rows = st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 3000), st.integers(1, 99)), min_size=1, max_size=6)


@quick
@given(rows=good_rows, cut=st.integers(0, 400), flip=st.integers(0, 255))
def test_a_good_mooncake_file_damaged_in_one_place(tmp_path, rows, cut, flip):
    text = "".join(
        json.dumps({"timestamp": t, "input_length": i, "output_length": o, "hash_ids": list(range(-(-i // 512)))})
        + "\n"
        for t, i, o in rows
    ).encode()
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(text)
    assert len(outcome("mooncake", path)) == len(rows)
    place = cut % len(text)
    path.write_bytes(text[:place] + bytes([flip]) + text[place + 1 :])
    outcome("mooncake", path)
    path.write_bytes(text[:place])
    outcome("mooncake", path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
messages = st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "system"]), "value": st.text(max_size=20)})
entries = json_values | st.fixed_dictionaries({"conversations": st.lists(messages, max_size=5) | json_values})


@quick
@given(content=st.lists(entries, max_size=4).map(json.dumps) | json_values.map(json.dumps) | st.text(max_size=40))
def test_any_sharegpt(tmp_path, word_tokenizer, content):
    path = tmp_path / "chats.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    try:
        traces.load("sharegpt", path, traces.LoadOptions(tokenizer=str(word_tokenizer)))
    except InputError as error:
        assert "\n" not in str(error)


lengths = st.dictionaries(st.integers(-1, 10**12) | st.floats(), st.floats() | st.integers(-1, 5), max_size=3).map(str)
tables = st.dictionaries(
    st.sampled_from(["0", "21600", "x"]),
    st.fixed_dictionaries({"input_tokens": lengths, "output_tokens": lengths}),
    max_size=2,
)
windows = st.lists(st.lists(cells, min_size=6, max_size=6).map(",".join), max_size=3).map("\n".join)
good_windows = st.sampled_from(["0,0.05,1,Gamma,1,1\n600,0,0,,0,0", "0,0.01,1,Weibull,0.5,9"])


@quick
@given(table=tables.map(json.dumps) | st.text(max_size=30), window=windows | good_windows)
def test_any_servegen_folder(tmp_path, table, window):
    (tmp_path / "chunk-0-dataset.json").write_bytes(table.encode("utf-8", "surrogatepass"))
    (tmp_path / "chunk-0-trace.csv").write_bytes(window.encode("utf-8", "surrogatepass"))
    outcome("servegen", tmp_path)


parquet_columns = st.sampled_from(
    [
        [1, 2],
        [0.5, None],
        ["1", "x"],
        [True, False],
        [[1], [2]],
        [{"a": 1}, {"a": 2}],
        [b"1", b"\xff"],
        [-1.0, 2.0],
        [1e300, 1.0],
    ]
)


@quick
@given(columns=st.lists(parquet_columns, min_size=6, max_size=6))
def test_any_types_in_parquet(tmp_path, columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("arrival_s", "input_tokens", "output_tokens", "id", "session", "prefix_blocks")
    path = tmp_path / "any.parquet"
    pq.write_table(pa.table(dict(zip(names, columns, strict=True))), path)
    outcome("own", path)
