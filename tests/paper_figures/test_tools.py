"""What the scripts share: kept sweeps, rates from requests, ratios, the page, and figure 11's CSV."""

import json

import pandas as pd
import pytest
from curves import highest, ratios, settings
from known import Known
from page import deviation, nearest, write_page
from sheet import row_of
from study import SWEEP_FILE, NoData, Study, decode_tok_per_s, fixed, fullest_s

import infsim

SWEEP = {"base": {"system": "vllm-multi", "cluster": {"nodes": 1, "gpus_per_node": 1}, "workload": fixed(100, 10, 12)}}


def requests_of(*rows):
    frame = pd.DataFrame(rows, columns=["first_token_s", "finish_s", "output_tokens"])
    return frame.assign(status="finished")


def test_a_sweep_is_kept_and_said_to_be_stale_when_the_sources_have_changed(tmp_path, monkeypatch):
    study = Study(tmp_path, "tiny")
    manifest = study.runs("a", SWEEP).folders[0] / "manifest.json"
    first = manifest.stat().st_mtime_ns
    study.runs("a", SWEEP)
    assert manifest.stat().st_mtime_ns == first and not study.stale
    monkeypatch.setattr("study.sources", lambda: "others")
    study.runs("a", SWEEP)
    assert manifest.stat().st_mtime_ns == first and len(study.stale) == 1
    Study(tmp_path, "tiny", fresh=True).runs("a", SWEEP)
    assert manifest.stat().st_mtime_ns > first


def test_another_configuration_gets_a_folder_of_its_own(tmp_path):
    study = Study(tmp_path, "tiny")
    other = {"base": {**SWEEP["base"], "seed": 1}}
    assert study.runs("a", SWEEP).folder != study.runs("a", other).folder


def test_a_rate_counts_the_part_of_each_request_in_the_window():
    requests = requests_of((0.0, 10.0, 11), (5.0, 15.0, 21))
    assert decode_tok_per_s(requests, 0.0, 10.0) == pytest.approx(1.0 + 2.0 * 0.5)
    assert decode_tok_per_s(requests, 5.0, 10.0) == pytest.approx(3.0)


def test_the_fullest_time_is_where_most_decode():
    assert fullest_s(requests_of((0.0, 9.0, 2), (3.0, 8.0, 2), (4.0, 5.0, 2))) == (4.0, 5.0)


def test_ratios_are_of_the_best_throughputs():
    head = {"trace": 0, "split": "chat", "engine": "graphs", "link": "100 Gb/s", "replicate": 0}
    rows = [("vllm-multi", 10.0), ("vllm-multi", 20.0), ("infinite-llm", 15.0), ("infinite-llm", 30.0)]
    frame = pd.DataFrame([{**head, "system": system, "output_tok_per_s": rate} for system, rate in rows])
    assert ratios(frame, "vllm-multi")["ratio"].tolist() == [1.5]
    assert highest(frame, "vllm-multi") == {"throughput over vllm-multi": 1.5}
    slow = frame.assign(engine="eager-2023", output_tok_per_s=[10.0, 20.0, 30.0, 60.0])
    assert settings(pd.concat([frame, slow]), "vllm-multi") == {
        "trace 0, chat, graphs, 100 Gb/s": {"throughput over vllm-multi": 1.5},
        "trace 0, chat, eager-2023, 100 Gb/s": {"throughput over vllm-multi": 3.0},
    }


def test_ratios_are_of_runs_with_the_same_seed():
    head = {"trace": 0, "split": "chat", "engine": "graphs", "link": "100 Gb/s"}
    rows = [(0, "vllm-multi", 10.0), (0, "infinite-llm", 10.0), (1, "vllm-multi", 5.0), (1, "infinite-llm", 10.0)]
    frame = pd.DataFrame([{**head, "replicate": r, "system": s, "output_tok_per_s": rate} for r, s, rate in rows])
    assert ratios(frame, "vllm-multi")["ratio"].tolist() == [1.0, 2.0]
    assert highest(frame, "vllm-multi") == {"throughput over vllm-multi": 1.5}


def entry_of(ours):
    settings = {"fast": {"rate": ours}, "slow": {"rate": 90.0}, "other": {"speed": 100.0}}
    known = [row_of(Known("1x", "rate", 100.0, "tok/s", "fig"), ours, settings)]
    names = {
        "figure": "1x",
        "stem": "fig01x",
        "title": "T",
        "claim": "Figure 1x.\n\nClaim: so.",
        "parts": "P.",
        "why": "W.",
    }
    return names | {"size": "tiny", "runs": ["a-1"], "stale": [], "known": known}


def test_the_page_puts_ours_beside_the_papers(tmp_path):
    (tmp_path / "fig01x.json").write_text(json.dumps(entry_of(150.0)))
    skipped = {"figure": "2", "stem": "fig02", "title": "U", "skipped": "no CSV"}
    (tmp_path / "fig02.json").write_text(json.dumps(skipped))
    text = write_page(tmp_path, tmp_path).read_text()
    assert "| rate | 100 tok/s [fig] | 150 tok/s | **+50 %** | 90 (slow) |" in text
    other = tmp_path / "page"
    other.mkdir()
    (tmp_path / "fig01x.png").write_bytes(b"")
    assert "](pictures/fig01x.png)" in write_page(tmp_path, other, other / "pictures").read_text()
    assert "Claim: so." in text and "Runs: a-1." in text and "Not made here: no CSV" in text


def test_only_large_deviations_are_bold():
    assert deviation(row_of(Known("x", "y", 100.0, "", "A"), 120.0, {})) == "+20 %"
    assert deviation(row_of(Known("x", "y", 1.0, "", "A", 2.0), 1.5, {})) == "within"
    assert deviation(row_of(Known("x", "y", 0.0, "%", "A"), 3.0, {})) == "3 %"


def test_the_nearest_setting_is_shown_only_where_ours_is_far_off():
    settings = {"a": {"y": 70.0}, "b": {"y": 101.0}, "undefined": {"y": float("nan")}}
    known = Known("x", "y", 100.0, "", "A")
    assert nearest(row_of(known, 70.0, settings)) == "101 (b)"
    assert nearest(row_of(known, 90.0, settings)) == ""
    assert nearest(row_of(known, 70.0, {})) == ""
    assert nearest(row_of(known, 70.0, {"a": {"y": 70.0}, "b": {"y": 1.0}})) == "none nearer"
    ranged = Known("x", "y", 2.0, "×", "A", 4.0)
    assert nearest(row_of(ranged, 9.0, {"far": {"y": 8.0}, "in": {"y": 3.0}})) == "3 (in)"


def test_a_sweeps_file_makes_the_same_runs_again(tmp_path):
    runs = Study(tmp_path, "tiny").runs("a", SWEEP)
    again = infsim.run(runs.folder / SWEEP_FILE, out=tmp_path / "again")
    tables = [folder / "requests.parquet" for folder in (*runs.folders, *again.folders)]
    assert len(tables) == 2 and tables[0].read_bytes() == tables[1].read_bytes()


def test_figure_11_names_what_makes_its_data(tmp_path, monkeypatch, script):
    monkeypatch.setenv("BENCH_CSV", str(tmp_path / "absent.csv"))
    with pytest.raises(NoData, match=r"infreal\.bench"):
        script("fig11_attention").table(Study(tmp_path))


def test_figure_11_is_drawn_from_a_benchmarks_csv(tmp_path, monkeypatch, script):
    from sheet import make

    ways = {"dist_attention": 1.0, "tensor_parallel_attention": 1.25, "ring_attention": 8.0}
    rows = [
        {"operator": way, "gpu": "g", "software": "s", "dtype": "float16", "ranks": 4, "rows": 1, "num_bytes": 1000}
        | {"context_tokens": tokens, "time_s": 1e-6 * tokens * factor}
        for way, factor in ways.items()
        for tokens in (4_096, 32_768)
    ]
    path = tmp_path / "attention.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    monkeypatch.setenv("BENCH_CSV", str(path))
    entry = make(script("fig11_attention"), Study(tmp_path / "out", "tiny"))
    assert [row["ours"] for row in entry["known"]] == pytest.approx([20.0, 8.0])
