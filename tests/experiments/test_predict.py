"""The dict of `infsim predict`, its notation, and its command."""

import json
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from experiments.config import SYSTEMS, Config
from experiments.plan import plan_run
from experiments.predict import Query, parse_decode, parse_engine, parse_prefill, predict
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


SPLITTING = {"preset": "graphs", "splits_all_heads": True}


def test_an_engine_may_split_the_kv_of_all_heads():
    """LLaMA2-7B over 8 A100: 4 heads a rank, measured with a kernel that walks a long row on 4 multiprocessors."""
    measured, split = (
        predict(Query("llama2-7b", tensor_parallel=8, engine=engine, decode=["1x131072"]))["parts"]["decode_attention"]
        for engine in ("graphs", SPLITTING)
    )
    assert split["s"] < 0.1 * measured["s"]
    assert (measured["basis"], split["basis"]) == ("measured", "extrapolated")


@pytest.mark.parametrize(("model", "gpu"), [("llama2-70b", "a100-80gb"), ("llama2-7b", "h100-80gb")])
def test_grouped_heads_and_kernels_that_split_are_priced_as_measured(model, gpu):
    query = Query(model, gpu, tensor_parallel=8, decode=["1x131072"])
    assert predict(query) == predict(replace(query, engine=SPLITTING))


def test_an_engine_is_named_or_a_mapping():
    assert parse_engine("graphs") == "graphs"
    assert parse_engine("{preset: graphs, splits_all_heads: true}") == SPLITTING
    for text in ("", "[graphs]", "3"):
        with pytest.raises(InputError, match=r"--engine: .*allowed: a name, or \{preset: NAME, KEY: VALUE}"):
            parse_engine(text)


def test_memory_and_longest_context_need_no_batch():
    found = predict(Query("llama2-7b"), memory=True, max_context=True)
    assert set(found) == {"memory", "max_context_tokens", "max_context"}
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


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (8, 1), (2, 2)])
def test_longest_contexts_are_those_that_a_run_announces(system, tp, pp):
    sizes = {"tensor_parallel": tp, "pipeline_parallel": pp}
    run = plan_run(Config(system=system, instance=sizes, workload={"generator": "paper-0", "rate_rps": 1.0}).resolved())
    entries = predict(Query("llama2-7b", tensor_parallel=tp, pipeline_parallel=pp), max_context=True)["max_context"]
    shared = set(run.facts["pool"]) & set(entries[0])
    assert shared == set(entries[0]) - {"system"}
    assert {"system": system} | {key: run.facts["pool"][key] for key in shared} in entries


def test_longest_contexts_of_layouts_that_do_not_fit_or_do_not_exist():
    query = Query("llama2-70b", tensor_parallel=8, cluster="1x8")
    found = {(e["system"], e["tensor_parallel"]): e for e in predict(query, max_context=True)["max_context"]}
    assert found["infinite-llm", 1]["longest_request_tokens"] == 0
    assert found["vllm-multi", 4]["longest_request_tokens"] < found["infinite-llm", 4]["longest_request_tokens"]
    odd = predict(Query("llama2-13b", cluster="3x7"), max_context=True)["max_context"]
    assert {entry["system"] for entry in odd} == {"vllm-multi", "infinite-llm"}, "no split of 21 GPUs divides the model"
    with pytest.raises(InputError, match="layout single: 7 GPUs cannot hold one llama2-7b"):
        predict(Query("llama2-7b", pipeline_parallel=2, cluster="1x7"), max_context=True)
    with pytest.raises(InputError, match=r"--cluster: '8' \(allowed: NODESxGPUS"):
        predict(Query("llama2-7b", cluster="8"), max_context=True)


def test_command_prints_json_or_a_table():
    options = ["--model", "llama2-7b", "--gpu", "a100-80gb", "--decode", "8x1024"]
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert list(found["parts"]) == PARTS
    shown = CliRunner().invoke(app, [*options, "--memory", "--max-context"]).stdout
    for word in ("non_attention", "roofline", "kv_tokens", "longest context", "4 × TP8"):
        assert word in shown
