"""`infreal run --ray` and hosts as Ray actors: the tokens of the backend in one process whatever fails, and nothing is left."""

import secrets
import signal
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
from pool_tools import QUICK, Checked, Restless, cluster, workload
from ray_tools import (
    RayRun,
    end_by,
    environment,
    local_ray,
    processes,
    send_signal,
    start_long_run,
    start_run,
    wait_until_none,
)

from experiments.eventlog import EventLog, Replay, read_log
from experiments.runs import load_runs
from infreal.run import main
from infsim.__main__ import main as infsim_main
from perfmodel.journal import Together
from perfmodel.messages import GMANAGER

pytest.importorskip("ray")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("ray"), pytest.mark.timeout(180)]
SOON = replace(QUICK, lease_s=2.0, renew_s=0.3, order_ttl_s=1.0)
LOAD = workload([(30, 300), (44, 300), (20, 300), (60, 300)], gap_s=0.02)
MAKE = partial(cluster, 2, 260, placement=Restless, scheduler=SOON)


@pytest.fixture(scope="module")
def cluster_of_three():
    with local_ray(num_cpus=3) as mark:
        yield mark


class Commands:
    """Observer that keeps the commands of each machine."""

    def __init__(self):
        self.commands = {}

    def command(self, t_s, machine, command):
        self.commands.setdefault(machine, []).append((t_s, command))

    def event(self, t_s, machine, event): ...
    def span(self, machine, start_s, end_s, step): ...
    def note(self, t_s, what, **values): ...


def test_tokens_moves_and_replay(cluster_of_three, tmp_path):
    """Prompts over two instances and moves in mid-decode: the tokens of the backend in one process, for each request; and the log
    gives fresh machines the same commands and tables."""
    make_spec = partial(cluster, 2, 60, placement=Restless)
    load = workload(
        [(30, 150), (40, 130), (260, 40), (20, 120)], gap_s=0.05
    )  # long enough for moves to find them running
    seen = Commands()
    with (tmp_path / "events.jsonl").open("w") as file:
        run = RayRun(make_spec, load, observer=Together([EventLog(file, {}), seen])).finish()
    run.assert_exact()
    one_process = Checked(make_spec(), load).finish()
    assert run.head.outputs == one_process.run.outputs
    assert run.count("throughput") > 0
    assert run.count("capacity") > 0
    replay = Replay(make_spec())
    result = replay.run(read_log(tmp_path / "events.jsonl")[1])
    for machine, commands in seen.commands.items():
        assert [(t_s, command) for t_s, who, command in replay.commands if who == machine] == commands
    assert result == run.result


def when_lent(run, who, number=signal.SIGKILL):
    """A signal to the debtor ("src") or creditor ("dst") of a loan that is held, as soon as there is one."""
    moves = run.head.books.collector.moves
    held = [i for i, outcome in enumerate(moves["outcome"]) if outcome == "committed"]
    if not held:
        run.at(run.fleet.now_s() + 0.01, when_lent, who, number)
        return
    run.victim = who if isinstance(who, int) else moves[who][held[-1]]
    send_signal(run, run.victim, number)


FAULTS = [("dst", signal.SIGKILL), ("src", signal.SIGKILL), (GMANAGER, signal.SIGKILL), ("dst", signal.SIGSTOP)]


def check(who, number):
    """One fault in mid-step; whoever had it returns under a new incarnation."""
    run = RayRun(MAKE, LOAD, deadline_s=6.0 if number == signal.SIGSTOP else 30.0)
    run.at(0.3, when_lent, who, number)
    run.finish().assert_exact()
    member = run.head.members[run.victim]
    assert member.deaths == 1
    assert sum(other.deaths for other in run.head.members.values()) == 1


@pytest.mark.parametrize(
    ("who", "number"), [FAULTS[0], *(pytest.param(*fault, marks=pytest.mark.slow) for fault in FAULTS[1:])]
)
def test_a_fault_in_mid_step(cluster_of_three, who, number):
    """S14: a creditor, a debtor, the gManager killed; a creditor stopped, which is found silent, ended and replaced."""
    check(who, number)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_faults_twenty_times(cluster_of_three):
    for _ in range(20):
        for who, number in FAULTS:
            check(who, number)


@pytest.mark.slow
def test_the_command_writes_the_same_folder(cluster_of_three, folder, capsys):
    assert main(["sweep.yaml", "--out", "out", "--ray", "local", "--events", "--timeline"]) == 0
    assert "Trust: all times were measured (cpu, 1 threads)" in capsys.readouterr().out
    runs = load_runs("out")
    assert set(runs.requests["status"]) == {"finished"}
    assert infsim_main(["replay", str(runs.folders[0] / "events.jsonl"), "--out", "again"]) == 0
    for name in ("requests", "instances", "moves"):
        again = pd.read_parquet(next(folder.glob(f"again/runs/*/{name}.parquet")))
        pd.testing.assert_frame_equal(pd.read_parquet(runs.folders[0] / f"{name}.parquet"), again)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "cluster.gpus_per_node=4"], "--ray: 4 instances need 4 CPUs, the cluster has 3"),
        (["--no-wait"], "--no-wait: time is real on actors (allowed: without --ray)"),
        (["--workers", "2"], "--workers: 2 (allowed with --ray: 1, a run has the cluster for itself)"),
    ],
)
def test_what_actors_cannot_do_is_one_line(cluster_of_three, folder, capsys, arguments, said):
    assert main(["sweep.yaml", "--out", "out", "--ray", "local", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[-1]


def test_an_address_where_nobody_is(folder):
    process = start_run(folder, environment(secrets.token_hex(8)), "--ray", "127.0.0.1:1")
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert "--ray 127.0.0.1:1: no cluster answers there" in error.splitlines()[-1]


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_or_killed_command_leaves_nothing_running(folder, how):
    mark = secrets.token_hex(8)
    process = start_long_run(folder, environment(mark), "--ray", "local")
    assert len(processes(mark)) > 4
    end_by(process, how)
    assert not wait_until_none(mark)
