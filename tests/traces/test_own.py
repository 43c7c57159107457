"""Export, then replay, gives identical results."""

import json

import numpy as np
import pytest

import traces
from perfmodel.errors import InputError
from traces import GenerateOptions, LoadOptions

COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "ids", "session", "turn", "source_row", "flags")


def assert_same(first, second):
    assert len(first) == len(second)
    for name in COLUMNS:
        one, two = getattr(first, name), getattr(second, name)
        assert name == "source_row" or (one is None) == (two is None), name
        if one is not None:
            assert one.dtype == two.dtype, name
            assert np.array_equal(one, two), name
    assert first.block_tokens == second.block_tokens
    if first.prefix_blocks is not None:
        assert all(np.array_equal(a, b) for a, b in zip(first.prefix_blocks, second.prefix_blocks, strict=True))
    if first.closed is not None:
        assert first.closed.users == second.closed.users
        assert np.array_equal(first.closed.think_s, second.closed.think_s)


@pytest.fixture(params=[".csv", ".csv.gz", ".parquet"])
def target(request, tmp_path):
    return tmp_path / f"own{request.param}"


@pytest.mark.parametrize("cv", [1.0, 2.0])
def test_generated(target, cv):
    trace = traces.generate("paper-4", GenerateOptions(num_requests=500, rate_rps=3.7, arrivals="gamma", cv=cv))
    traces.write_own(trace, target)
    assert_same(trace, traces.load("own", target))


def test_closed_loop(target):
    options = GenerateOptions(num_requests=50, arrivals="closed", users=7, think_s=1.3)
    trace = traces.generate("empirical-azure-conv", options)
    traces.write_own(trace, target)
    assert_same(trace, traces.load("own", target))


def test_every_optional_column(write, target):
    fields = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "turn", "hash_ids")
    values = [
        (7, -1, 0.1, 20, 3, 1, [5, 6]),
        (8, 7, 0.2, 36, 0, 2, [5, 6, 7]),
        (9, -1, 0.3, 90, 4, 1, [1, 2, 3, 4, 5, 6]),
    ]
    rows = [json.dumps(dict(zip(fields, row, strict=True))) for row in values]
    path = write("\n".join(rows))
    options = LoadOptions(keep_failed=True, max_context_tokens=50, over_long="clip_input", window_s=(0.1, 9))
    trace = traces.load("bailian", path, options)
    assert trace.flags.tolist() == ["failed", "clipped"]
    traces.write_own(trace, target)
    again = traces.load("own", target)
    assert_same(trace, again)
    assert again.source_row.tolist() == [2, 3], "the row of the first file, not of the export"


def test_text_ids_stay_text(write, target):
    trace = traces.load("own", write("arrival_s,input_tokens,output_tokens,id\n0,1,1,007\n1,2,2,a b\n"))
    assert trace.ids.tolist() == ["007", "a b"]
    traces.write_own(trace, target)
    assert_same(trace, traces.load("own", target))


def test_a_replayed_rate_is_the_rate_of_the_original(target):
    trace = traces.generate("paper-1", GenerateOptions(num_requests=200, rate_rps=2.0))
    traces.write_own(trace, target)
    once, twice = traces.load("own", target, LoadOptions(rate_rps=5.0)), traces.load("own", target)
    np.testing.assert_allclose(once.arrival_s * 5.0, twice.arrival_s * twice.mean_rate_rps, rtol=1e-12)


def test_export_refuses_other_names_and_unwritable_folders(tmp_path):
    trace = traces.generate("paper-0", GenerateOptions(num_requests=2, rate_rps=1.0))
    with pytest.raises(InputError, match=r"ends with .csv, .csv.gz, .parquet"):
        traces.write_own(trace, tmp_path / "x.txt")
    for name in ("x.csv", "x.parquet", "x.csv.gz"):
        with pytest.raises(InputError, match="cannot be written"):
            traces.write_own(trace, tmp_path / "absent" / name)
