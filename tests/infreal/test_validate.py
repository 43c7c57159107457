"""`infreal validate`: all steps on a tiny model, and that what is there is not done again. Times are not judged."""

import numpy as np
import pytest

from experiments.verdicts import remote_frac
from infreal.validate import main
from infreal.validation.cases import FULL, NO_WAIT, WORKLOADS, write_trace
from infsim.__main__ import main as infsim_main


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(600)
def test_from_profile_to_page(tmp_path, capsys):
    pytest.importorskip("ray")
    assert main(["--quick", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["workload", "metric", "simulated", "real", "error", "allowed", "verdict"]
    verdicts = [line for line in out[1:] if line.endswith(("within", "falls short"))]
    assert len(verdicts) == 2 * 2 * 5, "loads, systems, metrics"
    page = (tmp_path / "validate.md").read_text()
    assert "infreal run paced.yaml" in page and "infsim calibrate" in page and "torch" in page
    assert (tmp_path / "validate.png").exists() and (tmp_path / "paced-compared" / "compare.png").exists()
    log = (tmp_path / "commands.log").read_text()
    assert log.count("$ infreal profile") == 5, "both cores before each real run, and the pair"
    assert main(["--quick", "--out", str(tmp_path)]) == 0
    again = (tmp_path / "commands.log").read_text()[len(log) :].splitlines()
    assert [line.split()[1:3] for line in again if line.startswith("$")] == [
        ["infsim", "calibrate"],
        *([["infsim", "run"], ["infsim", "compare"]] * 2),
    ], "nothing is measured again"


def test_the_same_requests_come_at_every_load(tmp_path):
    tables = {}
    for load, rate in ((NO_WAIT, None), (0.5, 1.0), (1.0, 2.0)):
        lines = (tmp_path / write_trace(tmp_path, FULL, "heavy", load, rate)).read_text().splitlines()[1:]
        tables[load] = [line.split(",") for line in lines]
    assert len({tuple(map(tuple, (line[1:] for line in table))) for table in tables.values()}) == 1
    assert {float(line[0]) for line in tables[NO_WAIT]} == {0.0}
    half, whole = ([float(line[0]) for line in tables[load]] for load in (0.5, 1.0))
    assert half == pytest.approx([2 * t for t in whole], abs=1e-5) and half[-1] > 0


def test_workloads_are_what_they_are_called(tmp_path):
    longest = {name: [sum(pair) for pair in make(FULL, np.random.default_rng(0))] for name, make in WORKLOADS.items()}
    room = FULL.instance_tokens
    assert max(longest["short"]) < room / 2
    assert sum(tokens > room for tokens in longest["one-long"]) == 1
    assert sum(tokens > room for tokens in longest["heavy"]) > 1 and np.median(longest["heavy"]) < room / 4


@pytest.mark.parametrize(("tokens", "low", "high"), [(100, 0.3, 0.7), (30, 0.0, 0.0)])
def test_the_remote_share_is_that_of_the_tokens_read(tmp_path, tokens, low, high):
    """A request of 140 tokens on instances of 80: about half of what it reads is on the other one."""
    config = tmp_path / "one.yaml"
    workload = (
        f"{{generator: fixed, params: {{input_tokens: {tokens}, output_tokens: 40}}, num_requests: 1, rate_rps: 1}}"
    )
    sizes = "cluster: {nodes: 1, gpus_per_node: 2}, instance: {blocks_per_gpu: 5, headroom_frac: 0.0}"
    config.write_text(f"base: {{{sizes}, workload: {workload}}}")
    assert infsim_main(["run", str(config), "--events", "--out", str(tmp_path / "out")]) in (0, None)
    [log] = (tmp_path / "out").glob("runs/*/events.jsonl")
    assert low <= remote_frac(log) <= high
