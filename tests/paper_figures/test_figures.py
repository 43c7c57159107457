"""Every figure's script at its smallest size: files come out, and shapes hold that must hold by logic."""

from pathlib import Path

import numpy as np
import pytest
from known import KNOWN, Known
from matplotlib.image import imread
from study import fixed

FOLDER = Path(__file__).parents[2] / "paper_figures"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("fig*.py"))
BENCH = "fig11_attention"  # needs a benchmark's CSV


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != BENCH])
def test_a_figure_is_made_with_its_numbers_and_compared(name, made, study):
    entry, frame = made(name)
    assert len(frame) > 1
    assert imread(study.out / f"{name}.png").std() > 0.02, "an empty picture"
    assert (study.out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert any(row["ours"] is not None for row in entry["known"]) or not entry["known"]
    for run in frame["run"].dropna() if "run" in frame else ():
        assert (study.out / run / "manifest.json").is_file(), "a point leads to its run"


def test_every_figure_of_the_paper_has_a_script_and_every_script_a_known_value(script):
    figures = {script(name).FIGURE for name in SCRIPTS}
    assert figures - {"10s"} == {known.figure for known in KNOWN}  # 10s compares with nothing
    assert figures >= {"1a", "1b", "1c", "2", "4c", "5", "6", "7", "9", "10a", "10b", "11", "12a"}


def test_every_script_says_what_it_claims_and_what_is_simulated(script):
    for module in map(script, SCRIPTS):
        assert "Claim:" in module.__doc__ and "eproduced" in module.__doc__, module.__name__
        assert module.WHY and any(word in module.PARTS for word in ("Measured", "Simulated", "Analytic")), (
            module.__name__
        )


def test_names_of_known_values_are_unique_within_a_figure():
    names = [(known.figure, known.name) for known in KNOWN]
    assert len(set(names)) == len(names)


def test_a_deviation_is_from_the_value_or_from_the_nearer_end_of_a_range():
    assert Known("x", "y", 100.0, "", "A").deviation(125.0) == pytest.approx(0.25)
    ranged = Known("x", "y", 2.0, "", "A", 4.0)
    assert [ranged.deviation(ours) for ours in (1.0, 3.0, 5.0)] == pytest.approx([-0.5, 0.0, 0.25])


def test_memory_is_a_line_through_nothing_and_a_level(made):
    _, frame = made("fig01b_memory")
    assert np.allclose(frame["attention_bytes"] / frame["context_tokens"], 524_288)
    assert frame["non_attention_bytes"].nunique() == 1


def test_more_tensor_parallel_never_uses_a_gpu_better(made):
    _, frame = made("fig01c_tensor_parallel")
    for _, line in frame.groupby(["engine", "link", "batch"]):
        assert (np.diff(line.sort_values("tensor_parallel")["compute_util_frac"]) < 0).all()


def test_memory_grows_with_the_batch_and_nothing_exceeds_its_whole(made):
    _, frame = made("fig02_batch")
    for _, line in frame.groupby("length_tokens"):
        assert (np.diff(line.sort_values("batch")["memory_util_frac"]) > 0).all()
    assert frame[["memory_util_frac", "compute_util_frac"]].to_numpy().max() <= 1


def test_shipping_the_query_is_faster_than_shipping_kv_at_every_length(made):
    _, frame = made("fig04c_ship_query")
    times = frame.set_index(["way", "engine", "link", "place", "context_tokens"])["time_s"]
    assert (times["ship query"] < times["ship KV"]).all()


def test_shipping_more_kv_never_takes_less_time(made):
    _, frame = made("fig04c_ship_query")
    for _, line in frame[frame["way"] == "ship KV"].groupby(["engine", "link", "context_tokens"]):
        by_place = line.set_index("place")["time_s"]
        assert (
            np.diff(by_place[[f"{share} KV on another GPU" for share in ("1/2 of the", "3/4 of the", "all")]]) > 0
        ).all()
    for _, line in frame.groupby(["way", "engine", "link", "place"]):
        assert (np.diff(line.sort_values("context_tokens")["time_s"]) > 0).all()


def test_overlap_is_free_up_to_a_point_and_never_faster_than_free(made):
    _, frame = made("fig06_overlap")
    assert (frame["step_s"] >= frame["hidden_s"]).all()
    for _, line in frame[frame["kind"] == "move"].groupby(["engine", "link"]):
        assert line["step_s"].iloc[0] == line["hidden_s"].iloc[0]
        assert (np.diff(line["step_s"]) >= 0).all()


def test_a_faster_link_never_makes_a_step_longer(made):
    _, frame = made("fig06_overlap")
    for kind, links in (("remote", ["125 MB/s", "100 Gb/s", "NVLink"]), ("move", ["125 MB/s", "100 Gb/s"])):
        steps = frame[frame["kind"] == kind].pivot_table(index=["engine", "x"], columns="link", values="step_s")[links]
        assert (np.diff(steps.to_numpy(), axis=1) <= 1e-12).all()


@pytest.mark.parametrize("name", ["fig10a_short_traces", "fig10b_long_traces"])
def test_every_request_of_a_trace_ends_in_both_systems_and_none_is_served_twice(name, made):
    _, frame = made(name)
    ends = frame.assign(ends=frame["num_finished"] + frame["num_rejected"]).pivot(index="replicate", columns="system")
    assert ends["ends"].nunique(axis=1).eq(1).all()
    assert frame["served_token_frac"].between(0, 1).all()


def test_more_memory_never_hurts_pooled_instances(study):
    workload = fixed(1_000, 200, 60)
    cluster, blocks = {"nodes": 1, "gpus_per_node": 2}, [130, 260, 520, 1_040]
    base = {"model": "llama2-7b", "cluster": cluster, "workload": workload}
    found = study.summary("memory", {"base": base, "axes": {"instance.blocks_per_gpu": blocks}})
    assert (found["num_finished"] == 60).all()
    assert (np.diff(found["makespan_s"]) <= 0).all()


def test_the_debtor_gains_and_the_creditor_loses_by_what_is_moved(made):
    _, frame = made("fig07_debtor_creditor")
    for kind, lines in frame.groupby("kind"):
        ends = {
            side: line.sort_values("moved_tokens")["tok_per_s"].iloc[[0, -1]] for side, line in lines.groupby("side")
        }
        assert ends["debtor"].iloc[1] > ends["debtor"].iloc[0], kind
        assert ends["creditor"].iloc[1] < ends["creditor"].iloc[0], kind


def test_pooled_memory_holds_longer_contexts_and_costs_short_ones_nothing(made):
    _, frame = made("fig01a_throughput_context")
    by_layout = frame[frame["link"] == "100 Gb/s"].set_index("layout")
    longest, rate = by_layout["longest_context_tokens"], by_layout["output_tok_per_s"]
    assert longest["DP32TP1"] < longest["DP4TP8"] < longest["Infinite-LLM"]
    assert rate["Infinite-LLM"] == pytest.approx(rate["DP32TP1"], rel=0.02)


def test_the_start_of_figure_5_is_the_papers(made):
    """At the reduced size B and C start at the paper's batches; here at a share of them, and equal under all three ways."""
    _, frame = made("fig05_four_instances")
    starts = frame[(frame["kind"] == "batch") & frame["instance"].isin(["B", "C"])].groupby("instance")["batch"]
    assert (starts.max() < 1.3 * starts.min()).all()


@pytest.mark.slow
def test_the_sum_of_figure_7_has_its_best_point_inside_and_a_fall_behind_it(script, tmp_path):
    from study import Study

    frame = script("fig07_debtor_creditor").table(Study(tmp_path, "reduced"))
    total = frame[(frame["kind"] == "simulated") & (frame["side"] == "total")].sort_values("moved_tokens")["tok_per_s"]
    assert total.iloc[0] < total.max() > total.iloc[-1]
