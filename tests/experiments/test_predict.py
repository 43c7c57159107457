"""The dict of `infsim predict`, its notation, and its command."""

import json

import pytest
import typer
from typer.testing import CliRunner

from experiments.predict import Query, parse_decode, parse_prefill, predict
from infsim.predict_cli import predict as predict_command
from perfmodel.errors import InputError

app = typer.Typer()
app.command()(predict_command)
PARTS = ["non_attention", "prefill_attention", "decode_attention", "collectives", "host"]


def test_parts_sum_to_the_total_and_stay_above_the_roofline():
    found = predict(Query("llama2-70b", tensor_parallel=8, decode=["32x2048", "1x100000"], prefill=["512@4096"]))
    assert list(found["parts"]) == PARTS
    assert found["total_s"] == pytest.approx(sum(part["s"] for part in found["parts"].values()))
    assert 0 < found["roofline_s"] < found["total_s"]
    assert {part["basis"] for part in found["parts"].values()} <= {
        "measured",
        "interpolated",
        "extrapolated",
        "analytic",
    }


def test_eager_launches_count_as_host_time_where_kernels_do_not_hide_them():
    """One row of LLaMA2-70B on 8 A100 with the engine of 2023 took about 43 ms (simulators.md)."""
    found = predict(Query("llama2-70b", tensor_parallel=8, engine="eager-2023", decode=["1x128"]))
    assert found["total_s"] == pytest.approx(43e-3, rel=0.05)
    assert found["parts"]["host"]["s"] > 0.5 * found["total_s"]


def test_memory_and_longest_context_need_no_batch():
    found = predict(Query("llama2-7b"), memory=True, max_context=True)
    assert set(found) == {"memory", "max_context_tokens"}
    assert found["max_context_tokens"] == found["memory"]["kv_tokens"]


def test_decode_rows_are_priced_by_their_own_lengths():
    """The order and grouping of rows change nothing, and a batch costs at least its longest row alone."""
    one = predict(Query("llama2-7b", decode=["1x1000", "1x50000", "2x300"]))
    other = predict(Query("llama2-7b", decode=["1x300", "1x50000", "1x1000", "1x300"]))
    assert one == other
    assert one["total_s"] >= predict(Query("llama2-7b", decode=["1x50000"]))["total_s"]


def test_notation():
    assert parse_decode("32x2048") == (32, 2048)
    assert parse_prefill("2048@100000") == (2048, 100_000)
    assert parse_prefill("2048") == (2048, 0)


@pytest.mark.parametrize("text", ["32", "x", "0x5", "5x0", "-1x5", "axb", "1.5x2", ""])
def test_wrong_decode_notation(text):
    with pytest.raises(InputError, match=r"--decode: .*allowed: ROWSxCONTEXT"):
        parse_decode(text)


@pytest.mark.parametrize("text", ["", "0", "@5", "a@b", "5@", "-5"])
def test_wrong_prefill_notation(text):
    with pytest.raises(InputError, match=r"--prefill: .*allowed: TOKENS"):
        parse_prefill(text)


def test_nothing_to_predict_is_refused():
    with pytest.raises(InputError, match="name a batch"):
        predict(Query("llama2-7b"))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (Query("llama2-7b", tensor_parallel=3, decode=["1x1"]), "tensor_parallel: 3"),
        (Query("llama9", decode=["1x1"]), "unknown model 'llama9'"),
        (Query("llama2-7b", gpu="a1000", decode=["1x1"]), "unknown gpu 'a1000'"),
        (Query("llama2-7b", pack="b200", decode=["1x1"]), "b200"),
    ],
)
def test_wrong_names_and_sizes(query, message):
    with pytest.raises(InputError, match=message):
        predict(query)


def test_a_model_too_large_for_the_gpu_has_no_longest_context():
    with pytest.raises(InputError, match="does not fit"):
        predict(Query("llama2-70b"), max_context=True)


def test_command_prints_json_or_a_table():
    options = ["--model", "llama2-7b", "--gpu", "a100-80gb", "--decode", "8x1024"]
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert list(found["parts"]) == PARTS
    shown = CliRunner().invoke(app, [*options, "--memory", "--max-context"]).stdout
    for word in ("non_attention", "roofline", "kv_tokens", "longest context"):
        assert word in shown
