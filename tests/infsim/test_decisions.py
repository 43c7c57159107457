"""Decisions of two event logs side by side."""

import pytest

from experiments.decisions import decisions_of, equal_shares, first_divergence
from experiments.sweep import Loop, Recording, run_sweep
from experiments.sweepfile import load_sweep
from infsim.runner import run_one
from perfmodel.errors import InputError

BASE = {
    "system": "infinite-llm",
    "cluster": {"nodes": 1, "gpus_per_node": 3},
    "instance": {"blocks_per_gpu": 300},
    "workload": {"generator": "paper-3", "output": "balanced", "num_requests": 40, "rate_rps": 1.0},
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The same requests on the machine as it is, again, and on one whose attention takes a fifth longer."""

    def run(name, **changes):
        folder = tmp_path_factory.mktemp(name)
        run_sweep(load_sweep({"base": BASE | changes}), folder, Loop(run_one, Recording(events=True)))
        return next(folder.glob("runs/*/events.jsonl"))

    slower = {"truth": {"scale": {"decode_attention": 1.2, "prefill_attention": 1.2}}}
    return decisions_of(run("a")), decisions_of(run("again")), decisions_of(run("slower", **slower))


def test_equal_runs_decide_alike(logs):
    a, again, _ = logs
    assert first_divergence(a, again) is None
    shares = equal_shares(a, again)
    assert {"batch", "dispatch", "end", "lend"} <= set(shares)
    assert all(share == 1.0 and x == y > 0 for share, x, y in shares.values())


def test_the_first_difference_is_the_earliest_and_all_before_it_is_equal(logs):
    a, _, slower = logs
    place = first_divergence(a, slower)
    assert place is not None and (place.a.kind, place.a.what) != (place.b.kind, place.b.what)
    for machine, taken in a.items():
        for mine, other in zip(taken, slower[machine], strict=False):
            if max(mine.t_s, other.t_s) < place.t_s:
                assert mine.what == other.what
    shares = equal_shares(a, slower)
    assert 0 < min(share for share, _, _ in shares.values()) < 1


def test_a_request_is_sent_once_and_ends_once(logs):
    sent = [decision.what for decision in logs[0]["dispatcher"] if decision.kind == "dispatch"]
    assert len(sent) == len(set(sent)) == equal_shares(logs[0], logs[1])["end"][1]


def test_a_file_that_is_no_log_is_named(tmp_path):
    (tmp_path / "events.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="line 1: not an event log"):
        decisions_of(tmp_path / "events.jsonl")
