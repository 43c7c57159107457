"""The speed benchmark: what a run prints, keeps, compares and draws. Its figures are for people to judge."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infsim.bench.__main__ import in_process
from infsim.bench.cases import CASES, DEFAULT, SIZES, SYSTEMS, fixed
from infsim.bench.ledger import compare, draw, keep, last
from infsim.bench.planning import measure
from perfmodel.messages import IterationsDone

ROOT = Path(__file__).parents[2]


def test_a_run_is_measured_in_a_process_of_its_own():
    figures = in_process("infsim.bench.child", json.dumps({**fixed(4, 20), "system": "infinite-llm"}), ROOT)
    assert figures["requests_per_s"] > figures["whole_process_requests_per_s"] > 0
    assert figures["events_per_s"] > figures["requests_per_s"]
    assert figures["peak_mib"] > 20


def test_iterations_and_events_are_counted(cluster, workload):
    from infsim.driver import Simulation

    seen = []

    class Iterations:
        def event(self, t_s, machine, event):
            if isinstance(event, IterationsDone):
                seen.append(event.num_iterations)

        def command(self, *_):
            pass

        span = command

        def note(self, *_, **values):
            pass

    simulation = Simulation(cluster(), workload([(100, 20), (300, 5)]), Iterations())
    simulation.run()
    assert simulation.num_iterations == sum(seen) >= 20
    assert simulation.num_events > len(seen)


def test_most_debtors_of_the_planning_case_have_a_move_worth_making():
    assert measure(32)["moves"] >= 8


def test_figures_are_kept_compared_and_drawn(tmp_path):
    assert last(tmp_path) is None
    figures = {f"s-{n}-{system}": {"us_per_request": 10.0 * n} for n in SIZES for system in SYSTEMS}
    first = keep(tmp_path, figures)
    faster = {name: {"us_per_request": value["us_per_request"] / 2, "new": 1.0} for name, value in figures.items()}
    lines = compare(faster, last(tmp_path))
    assert "now / then" in lines[0]
    assert lines[1] == "# s-8-vllm-multi: us_per_request 0.50"
    assert keep(tmp_path, faster) > first
    assert last(tmp_path)["figures"] == faster
    assert draw(tmp_path, figures).stat().st_size > 10_000
    assert draw(tmp_path, {"a-32-vllm-multi": {}}) is None


def test_the_million_requests_run_only_when_asked_for():
    assert set(CASES) - set(DEFAULT) == {"e"}


def test_an_unknown_case_is_named():
    import typer

    from infsim.bench.__main__ import bench

    app = typer.Typer()
    app.command()(bench)
    result = CliRunner().invoke(app, ["--only", "ax"])
    assert result.exit_code == 2
    assert "'x'" in result.output
    assert "abcdefs" in result.output


@pytest.mark.parametrize("case", [name for name in CASES if CASES[name][1]])
def test_every_case_is_a_configuration(case):
    from experiments.config import Config

    for config in CASES[case][1].values():
        for system in SYSTEMS:
            assert Config.model_validate({**config, "system": system}).resolved().placement
