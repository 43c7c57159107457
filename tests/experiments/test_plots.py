"""Pictures: drawn, the same every time, and showing what they should."""

import matplotlib
import numpy as np
import pandas as pd
import pytest

from experiments.plots import busiest_ledger, draw_sweep, ledger_picture, throughput_latency
from experiments.plotstyle import SYSTEM_COLOURS, looks, save
from experiments.points import points_of
from experiments.runfolder import SCHEMAS
from experiments.sweep import Loop, run_sweep
from experiments.sweepfile import load_sweep

FIXED = {"generator": "fixed", "params": {"input_tokens": 100, "output_tokens": 10}, "num_requests": 20, "rate_rps": 1}
BASE = {"system": "vllm-multi", "cluster": {"nodes": 1, "gpus_per_node": 2}, "workload": FIXED}


def sweep_of(folder, run_one, axes, **base):
    return run_sweep(load_sweep({"base": {**BASE, **base}, "axes": axes}), folder, Loop(run_one))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, run_one):
    axes = {"system": ["vllm-multi", "vllm-single"], "workload.rate_rps": [1, 2]}
    return sweep_of(tmp_path_factory.mktemp("out"), run_one, axes)


def test_a_sweep_gets_png_and_svg_that_are_the_same_every_time(runs):
    paths = draw_sweep(runs)
    assert [path.name for path in paths] == ["throughput-latency.png", "throughput-latency.svg"]
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in draw_sweep(runs)] == first
    assert all(len(data) > 10_000 for data in first)


def test_every_system_has_its_lines_and_the_limits_are_marked(runs):
    figure = throughput_latency(points_of(runs.manifests))
    ttft, tpot, goodput = figure.axes
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["vllm-multi", "vllm-single", "p99 (filled: median)"]
    assert [line.get_ydata()[0] for line in (ttft.get_lines()[-1], tpot.get_lines()[-1])] == [10.0, 0.1]
    assert ttft.get_lines()[0].get_color() == SYSTEM_COLOURS["vllm-multi"]
    assert list(goodput.get_lines()[0].get_xdata()) == [1.0, 2.0]


def test_scenarios_get_a_row_each_and_a_single_run_a_dot(tmp_path, run_one):
    runs = sweep_of(tmp_path / "a", run_one, {"slo.tpot_s": [0.1, 0.2], "system": ["vllm-multi"]})
    assert len(throughput_latency(points_of(runs.manifests)).axes) == 6
    runs = sweep_of(tmp_path / "b", run_one, {})
    assert len(throughput_latency(points_of(runs.manifests)).axes[0].get_lines()[0].get_xdata()) == 1


def test_replicates_get_bars(tmp_path, run_one):
    runs = sweep_of(tmp_path, run_one, {"workload.rate_rps": [1, 2]}, replicates=2)
    assert throughput_latency(points_of(runs.manifests)).axes[2].containers


def ledger_tables():
    """Instance 0 borrows 5 blocks of instance 1 from t = 1 on; a refused move, and one back, are no debts."""
    samples = pd.DataFrame(0, index=range(6), columns=SCHEMAS["instances"].names)
    samples["t_s"], samples["instance"] = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [0, 1] * 3
    samples.loc[[2, 4], "borrowed_blocks"] = samples.loc[[3, 5], "lent_blocks"] = 5
    moves = pd.DataFrame(0, index=range(3), columns=SCHEMAS["moves"].names)
    moves["num_blocks"], moves["committed_s"] = [5, 9, 2], [0.8, np.nan, 1.9]
    moves["dst"], moves["kind"] = 1, ["throughput", "throughput", "back"]
    return samples, moves


def test_the_ledger_shows_who_borrows_from_whom_and_that_sums_agree(tmp_path):
    figure = ledger_picture(*ledger_tables(), "002-infinite-llm")
    over_time, sums, pairs = figure.axes[:3]
    assert over_time.collections[0].get_array().tolist() == [[0, 5, 5], [0, -5, -5]]
    borrowed, lent = sums.get_lines()
    assert borrowed.get_ydata().tolist() == lent.get_ydata().tolist() == [0, 5, 5]
    assert pairs.images[0].get_array().tolist() == [[0, 5], [0, 0]]
    assert pairs.get_title().startswith("2 moves")
    assert all(path.stat().st_size > 5_000 for path in save(figure, tmp_path / "ledger"))


def test_no_ledger_where_nothing_was_lent(runs):
    assert busiest_ledger(runs) is None


def test_own_pictures_keep_their_style(runs):
    before = dict(matplotlib.rcParams)
    draw_sweep(runs)
    assert dict(matplotlib.rcParams) == before


def test_systems_keep_their_colours_beside_others():
    found = looks(["mine", "vllm-multi", "other"])
    assert found["vllm-multi"]["color"] == SYSTEM_COLOURS["vllm-multi"]
    assert len({style["color"] for style in found.values()}) == 3
