"""The benchmark of an instance's ranks."""

import json

import pytest

from infreal.bench.ranks import Case, measure_ranks, summarize


def test_waiting_for_the_last_rank_is_told_from_the_collective():
    early = [("all_reduce", 1.0, 3.5), ("iteration", 0.0, 4.0)]
    late = [("all_reduce", 3.0, 3.5), ("iteration", 0.5, 4.0)]
    first, second = summarize([early, late])
    assert (first.iteration_s, first.computing_s, first.collectives_s, first.waiting_s) == (4.0, 1.5, 0.5, 2.0)
    assert (second.iteration_s, second.computing_s, second.collectives_s, second.waiting_s) == (3.5, 3.0, 0.5, 0.0)


@pytest.mark.slow
def test_two_ranks_in_two_processes(tmp_path):
    text = measure_ranks(Case(rows=2, context_tokens=40, iterations=5), tmp_path / "trace.json")
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["0", "1"]
    names = [
        (event["pid"], event["name"]) for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ]
    assert names.count((0, "iteration")) == names.count((1, "iteration")) == 5
    assert names.count((0, "all_reduce")) == names.count((1, "all_reduce")) == 5 * (1 + 2 * 30)
