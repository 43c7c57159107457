"""Run folders: declared types, complete or absent, manifests, reading back."""

import json

import pandas as pd
import pyarrow.parquet as pq
import pytest

from experiments.runfolder import SCHEMAS, read_table, without_nan
from experiments.runs import load_runs
from experiments.sweep import Loop, run_sweep
from experiments.sweepfile import load_sweep
from perfmodel.errors import InputError
from perfmodel.metrics import METRICS
from perfmodel.records import INSTANCE_COLUMNS, MOVE_COLUMNS, REQUEST_COLUMNS

FIXED = {"generator": "fixed", "params": {"input_tokens": 100, "output_tokens": 10}, "num_requests": 20, "rate_rps": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, run_one):
    base = {"system": "vllm-multi", "cluster": {"nodes": 1, "gpus_per_node": 2}, "workload": FIXED}
    sweep = load_sweep({"base": base, "axes": {"workload.rate_rps": [1, 2.5], "gpu": ["a100-80gb"]}})
    return run_sweep(sweep, tmp_path_factory.mktemp("out"), Loop(run_one))


def test_schemas_are_the_columns_of_the_records():
    columns = {"requests": REQUEST_COLUMNS, "instances": INSTANCE_COLUMNS, "moves": MOVE_COLUMNS}
    assert {name: tuple(schema.names) for name, schema in SCHEMAS.items()} == columns


def test_columns_keep_their_declared_types_even_when_all_null_or_empty(runs):
    for name, schema in SCHEMAS.items():
        assert pq.read_schema(runs.folders[0] / f"{name}.parquet") == schema
    assert read_table(runs.folders[0], "requests")["reason"].isna().all()


def test_summary_has_axes_replicate_and_the_metrics_in_order(runs):
    summary = pd.read_csv(runs.folder / "summary.csv")
    assert list(summary) == ["workload.rate_rps", "gpu", "replicate", *METRICS]
    assert summary["workload.rate_rps"].tolist() == [1.0, 2.5]


def test_the_manifest_names_configuration_versions_inputs_and_curves(runs):
    manifest = json.loads((runs.folders[1] / "manifest.json").read_text())
    assert manifest["config"]["workload"]["rate_rps"] == 2.5
    assert manifest["axes"] == {"workload.rate_rps": 2.5, "gpu": "a100-80gb"}
    assert {"python", "infsim", "numpy", "simpy"} <= manifest["versions"].keys()
    assert set(manifest["provenance"]) == {"belief", "truth"}
    assert manifest["workload"]["generator"] == "fixed"
    assert manifest["pool"]["num_instances"] == 2
    assert manifest["metrics"]["num_finished"] == 20
    assert manifest["metrics"]["kv_util_frac"] == 0.0


def test_tables_join_the_axes_in(runs):
    requests = runs.requests
    assert list(requests)[:3] == ["workload.rate_rps", "gpu", "replicate"]
    assert requests.groupby("workload.rate_rps").size().tolist() == [20, 20]
    assert runs.moves.empty and list(runs.moves)[3:] == list(MOVE_COLUMNS)
    assert len(runs.instances) == 4


def test_an_axis_that_is_called_like_a_column_is_kept_apart(tmp_path, run_one):
    base = {"system": "vllm-multi", "workload": FIXED}
    sizes = [{"block_tokens": 16}, {"block_tokens": 32}]
    runs = run_sweep(load_sweep({"base": base, "axes": {"instance": sizes}}), tmp_path, Loop(run_one))
    assert runs.requests["axis.instance"].unique().tolist() == ['{"block_tokens":16}', '{"block_tokens":32}']
    assert runs.requests["instance"].max() == 19


def test_a_folder_without_runs_is_named(tmp_path):
    with pytest.raises(InputError, match="holds no runs"):
        load_runs(tmp_path)
    with pytest.raises(InputError, match="holds no runs"):
        load_runs(tmp_path / "nowhere")


def test_a_damaged_manifest_is_named(tmp_path):
    folder = tmp_path / "runs" / "000-x"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"000-x/manifest.json: cannot be read"):
        load_runs(tmp_path)


def test_more_than_a_thousand_runs_stay_in_order(tmp_path):
    for number in (1000, 99, 101):
        folder = tmp_path / "runs" / f"{number:03d}-x"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text('{"status": "failed", "axes": {}, "replicate": 0}')
    assert [folder.name for folder in load_runs(tmp_path).folders] == ["099-x", "101-x", "1000-x"]


def test_json_knows_no_nan():
    assert without_nan({"a": float("nan"), "b": [float("inf"), 1.0], "c": (2,)}) == {
        "a": None,
        "b": [None, 1.0],
        "c": [2],
    }
