"""Two folders side by side."""

import numpy as np
import pytest

from experiments.compare import compare, error_frac, metric_table, request_table, shape_table
from experiments.plots_compare import picture
from experiments.sweep import HARDWARE, Loop, plan_jobs, run_jobs, run_sweep
from experiments.sweepfile import load_sweep
from perfmodel.errors import InputError

WORKLOAD = {"generator": "empirical-azure-conv", "num_requests": 200, "rate_rps": 1}
BASE = {"system": "vllm-multi", "cluster": {"nodes": 1, "gpus_per_node": 2}, "workload": WORKLOAD}


def sweep_into(folder, run_one, rates=(1, 2)):
    run_sweep(load_sweep({"base": BASE, "axes": {"workload.rate_rps": list(rates)}}), folder, Loop(run_one))
    return folder


def slower(run_one, factor):
    """A driver whose decodes take so many times as long."""

    def run(plan, folder, recording):
        result = run_one(plan, folder, recording)
        first_s = np.array(result.requests["first_token_s"])
        result.requests["finish_s"] = (first_s + factor * (np.array(result.requests["finish_s"]) - first_s)).tolist()
        return result

    return run


@pytest.fixture(scope="module")
def pair(tmp_path_factory, run_one):
    """B: every decode takes 10 % longer than in A, and A has one rate more."""
    out = tmp_path_factory.mktemp("pair")
    return sweep_into(out / "a", run_one, (1, 2, 3)), sweep_into(out / "b", slower(run_one, 1.1))


def test_errors_are_relative_to_a(pair):
    found = compare(*pair)
    metrics = found.metrics.query("run == 'workload.rate_rps=1'").set_index("metric")["error_frac"]
    assert metrics["tpot_s_p50"] == pytest.approx(0.1)
    assert metrics["ttft_s_p99"] == 0.0
    assert metrics["e2e_s_mean"] == pytest.approx(0.05)
    assert "wall_s" not in metrics
    assert found.only_a == ("workload.rate_rps=3",) and found.only_b == ()


def test_requests_are_matched_one_by_one(pair):
    found = compare(*pair)
    assert len(found.requests) == 400
    table = request_table(found).set_index("latency")
    assert table.loc["tpot_s", "median_error_frac"] == pytest.approx(0.1)
    assert table.loc["e2e_s", "p90_abs_error_frac"] == pytest.approx(0.05)
    assert metric_table(found).set_index("metric").loc["tpot_s_p99", "mean_abs_error_frac"] == pytest.approx(0.1)


def test_shapes_are_quarters_of_input_and_output(pair):
    table = shape_table(compare(*pair))
    assert table.shape == (4, 4)
    assert np.nanmax(np.abs(table.to_numpy() - 0.05)) < 1e-9


def test_the_picture_is_drawn_even_where_all_lengths_are_one(pair, tmp_path, run_one):
    assert len(picture(compare(*pair)).axes) == 8
    fixed = {"generator": "fixed", "params": {"input_tokens": 9, "output_tokens": 1}, "num_requests": 20, "rate_rps": 1}
    for side in ("a", "b"):
        run_sweep(load_sweep({"base": {**BASE, "workload": fixed}}), tmp_path / side, Loop(run_one))
    assert shape_table(compare(tmp_path / "a", tmp_path / "b")).shape == (1, 1)
    picture(compare(tmp_path / "a", tmp_path / "b"))


def test_folders_with_nothing_in_common_are_named(pair, tmp_path, run_one):
    other = sweep_into(tmp_path / "other", run_one, (7,))
    with pytest.raises(InputError, match=r"have no run in common \(workload.rate_rps=1; .* workload.rate_rps=7 here\)"):
        compare(pair[0], other)
    with pytest.raises(InputError, match="holds no runs"):
        compare(pair[0], tmp_path / "nowhere")


def test_error_of_zero_is_zero_or_infinite():
    assert error_frac([0.0, 0.0, 2.0], [0.0, 1.0, 1.0]).tolist() == [0.0, np.inf, -0.5]


def test_folders_that_repeat_a_run_show_its_noise(pair, tmp_path, run_one):
    """Three repetitions whose decodes take 1.0, 1.1 and 1.2 of the time: mean 1.1, standard deviation 0.1."""

    again = [sweep_into(tmp_path / f"{factor}", slower(run_one, factor), (1,)) for factor in (1.0, 1.1, 1.2)]
    found = compare(pair[0], *again)
    tpot = found.metrics.set_index("metric").loc["tpot_s_mean"]
    assert tpot["error_frac"] == pytest.approx(0.1) and tpot["noise_frac"] == pytest.approx(0.1 / 1.1)
    assert np.allclose(found.requests["tpot_s_error_frac"].dropna(), 0.1)
    assert metric_table(found).set_index("metric").loc["ttft_s_p50", "noise_there_frac"] == 0.0
    assert np.isnan(compare(*pair).metrics["noise_frac"]).all()


def test_reality_is_the_reference(pair, tmp_path, run_one):
    real = tmp_path / "real"
    jobs = plan_jobs(load_sweep({"base": BASE, "axes": {"workload.rate_rps": [1]}}), real, HARDWARE)
    run_jobs(jobs, real, Loop(run_one))
    found = compare(pair[1], real)
    assert (found.name_a, found.name_b) == (str(real), str(pair[1]))
    assert compare(real, pair[1]).name_a == str(real)
