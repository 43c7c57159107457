"""Configurations: defaults, axes and points, --set, paths, and one clear line for everything that is wrong."""

from pathlib import Path

import pytest

from experiments.config import SECTIONS, Config
from experiments.sweepfile import CONFIGS, expand, load_sweep, parse_settings
from perfmodel.errors import InputError

BASE = {"system": "vllm-multi", "workload": {"generator": "paper-0", "rate_rps": 4}}


def sweep(base, settings=None, **sections):
    return expand({"base": {**BASE, **base}, **sections}, settings or {}, "f.yaml", Path("/folder"))


def test_a_sweep_without_axes_is_one_run_with_the_documented_defaults():
    (run,) = sweep({}).runs
    assert run.config.instance.token_budget == 2048
    assert run.config.cluster.num_gpus == 32
    assert (run.config.layout, run.config.placement) == ("multi", "none")
    assert run.name == "000-vllm-multi"


def test_system_sets_layout_only_where_it_is_null():
    assert sweep({"system": "vllm-single"}).runs[0].config.layout == "single"
    assert sweep({"system": "vllm-single", "layout": "multi"}).runs[0].config.layout == "multi"


def test_axes_multiply_and_replicates_shift_the_seed():
    axes = {"system": ["vllm-multi", "vllm-single"], "workload.rate_rps": [1, 2.5]}
    runs = sweep({"seed": 7, "replicates": 2}, axes=axes).runs
    assert [run.name for run in runs][:4] == [
        "000-vllm-multi-1",
        "001-vllm-multi-1-r1",
        "002-vllm-multi-2.5",
        "003-vllm-multi-2.5-r1",
    ]
    assert len(runs) == 8
    assert [run.config.seed for run in runs[:2]] == [7, 8]
    assert runs[-1].axes == {"system": "vllm-single", "workload.rate_rps": 2.5}


def test_points_set_several_keys_together():
    points = [{"cluster.nodes": 1, "instance.tensor_parallel": 8}, {"cluster.nodes": 2, "instance.tensor_parallel": 4}]
    runs = sweep({}, points=points).runs
    assert [(r.config.cluster.nodes, r.config.instance.tensor_parallel) for r in runs] == [(1, 8), (2, 4)]


def test_dotted_names_reach_inside_a_preset_even_a_default_one():
    run = sweep({}, {"gpu.memory_bytes": 1, "engine.row_s": 0.0}).runs[0]
    assert run.config.gpu == {"preset": "a100-80gb", "memory_bytes": 1}
    assert run.config.engine == {"preset": "graphs", "row_s": 0.0}


def test_an_axis_may_be_a_whole_section():
    kinds = [{"generator": "paper-0", "rate_rps": 1}, {"trace": "own", "path": "x.csv"}]
    assert [run.config.workload.rate_rps for run in sweep({}, axes={"workload": kinds}).runs] == [1, None]


def test_paths_are_relative_to_the_file_and_those_of_set_to_the_current_directory():
    base = {"workload": {"trace": "own", "path": "x.csv"}, "dispatch": "mine.py:P", "model": "llama2-7b"}
    config = sweep(base).runs[0].config
    assert config.workload.path == "/folder/x.csv"
    assert (config.dispatch, config.model) == ("/folder/mine.py:P", "llama2-7b")
    config = sweep(base, {"workload.path": "y.csv"}).runs[0].config
    assert config.workload.path == str(Path.cwd() / "y.csv")
    config = sweep(base, axes={"model": ["m/config.json"]}).runs[0].config
    assert config.model == "/folder/m/config.json"


def test_settings_are_yaml():
    assert parse_settings(["a.b=4", "c=[1, x]", "d=null", "e=no"]) == {"a.b": 4, "c": [1, "x"], "d": None, "e": "no"}


@pytest.mark.parametrize(
    ("base", "line"),
    [
        ({"sed": 1}, "f.yaml: base.sed: unknown key 'sed'; did you mean 'seed'?"),
        ({"seed": True}, "base.seed: should be a valid integer, found True"),
        ({"macro": "no"}, "base.macro: should be a valid boolean, found 'no'"),
        (
            {"instance": {"token_budgt": 1}},
            "base.instance.token_budgt: unknown key 'token_budgt'; did you mean 'token_b",
        ),
        ({"instance": {"token_budget": 0}}, "base.instance.token_budget: should be greater than 0, found 0"),
        ({"cluster": 3}, "base.cluster: should be a mapping, found 3"),
        ({"gpu": 3}, "base.gpu: should be a name or a mapping {preset: NAME, KEY: VALUE, ...}"),
        (
            {"system": "vllm-mult"},
            "base.system: should be 'infinite-llm', 'vllm-multi' or 'vllm-single', found 'vllm-mult'",
        ),
        ({"slo": {"ttft_s": float("nan")}}, "base.slo.ttft_s: should be a finite number, found nan"),
        ({"belief": {"scale": {"host": -1}}}, "base.belief.scale.host: should be greater than 0, found -1"),
        (
            {"workload": {"generator": "x", "rate": 1}},
            "base.workload.rate: unknown key 'rate'; did you mean 'rate_rps'?",
        ),
        ({"workload": {"generator": "x", "arrivals": "gama"}}, "base.workload.arrivals: should be 'poisson', 'gamma'"),
        ({"workload": {"generator": "x", "arrivals": "closed"}}, "base.workload: users: "),
        ({"workload": {"generator": "x", "users": 3}}, "base.workload: users: "),
        ({"workload": {"generator": "x", "cv": 2}}, "base.workload: cv: "),
        ({"workload": {"trace": "own"}}, "base.workload.path: is required (in the file, or --set workload.path=...)"),
        ({"workload": {"trace": "own", "path": "x", "window_s": [3, 1]}}, "base.workload: window_s: [3, 1) is empty"),
        ({"workload": {}}, "base.workload.generator: is required"),
    ],
)
def test_the_first_error_is_one_line_with_its_path(base, line):
    with pytest.raises(InputError) as error:
        sweep(base)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sections", "settings", "line"),
    [
        ({"axes": {"workload.rate_rps": [1, "x"]}}, {}, "axes.workload.rate_rps: should be a valid number, found 'x'"),
        ({"axes": {"workload.rate_rps": 1}}, {}, "axes.workload.rate_rps: should be a list of values, found 1"),
        ({"axes": {"sede": [1]}}, {}, "axes.sede: unknown key 'sede'; did you mean 'seed'?"),
        ({"axes": {"seed": [1]}}, {"seed": 2}, "--set seed: is an axis"),
        ({"axes": {"workload": [BASE["workload"]]}}, {"workload.rate_rps": 2}, "--set workload.rate_rps: is an axis"),
        ({"axes": {"seed": [1]}, "points": [{"seed": 1}]}, {}, "axes and points exclude each other"),
        ({"points": [{"seed": 1}, {"macro": True}]}, {}, "points[1]: should set the same keys as points[0]: seed"),
        ({"axis": {"seed": [1]}}, {}, "unknown section 'axis'; did you mean 'axes'?"),
        ({}, {"seed.x": 1}, "--set seed.x: seed is"),
    ],
)
def test_wrong_sweeps_are_named(sections, settings, line):
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        sweep({"seed": 1}, settings, **sections)
    assert line in str(error.value)


def test_the_system_by_default_pools_memory():
    config = Config.model_validate({"workload": BASE["workload"]}).resolved()
    assert (config.system, config.layout, config.placement) == ("infinite-llm", "multi", "greedy")


def test_files_that_are_no_configuration_are_named(tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("base: {a: 1\naxes: [")
    with pytest.raises(InputError, match=r"broken.yaml:\d+:\d+: not YAML"):
        load_sweep(broken)
    doubled = tmp_path / "doubled.yaml"
    doubled.write_text("base: {seed: 1, seed: 2}\n")
    with pytest.raises(InputError, match=r"doubled.yaml.*duplicate key"):
        load_sweep(doubled)
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(InputError, match="should be a mapping"):
        load_sweep(tmp_path / "list.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary.yaml: cannot be read"):
        load_sweep(tmp_path / "binary.yaml")
    with pytest.raises(InputError, match=r"nowhere.yaml: no such file"):
        load_sweep(tmp_path / "nowhere.yaml")
    with pytest.raises(InputError, match="unknown configuration 'dem'; did you mean 'demo'"):
        load_sweep("dem")


def test_yaml_is_1_2_so_that_no_is_a_word(tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text("base: {system: vllm-multi, macro: no, workload: {generator: paper-0}}\n")
    with pytest.raises(InputError, match=r"base.macro: should be a valid boolean, found 'no'"):
        load_sweep(file)


def test_every_key_has_a_meaning_and_every_section_a_model():
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            assert field.description, f"{section}.{name} has no docstring"
    assert Config.model_validate(BASE).model_dump(mode="json")["workload"]["generator"] == "paper-0"


def test_a_resolved_configuration_reads_back_as_itself():
    config = sweep({}).runs[0].config
    assert Config.model_validate(config.model_dump(mode="json")) == config


def test_ready_configurations_are_valid():
    files = sorted(CONFIGS.glob("*.yaml"))
    assert [file.stem for file in files] >= ["azure-conversation", "demo", "mooncake-conversation"]
    for file in files:
        needs_path = "trace:" in file.read_text()
        assert load_sweep(file, {"workload.path": "x"} if needs_path else {}).runs
