"""`infreal run --ray` and the same hosts as Ray actors: the tokens of the backend in one process, and nothing left behind."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from pool_tools import CONFIG, Checked, Restless, cluster, workload
from ray_tools import RayRun, environment, local_ray, processes, wait_until_none

from experiments.eventlog import EventLog, Replay, read_log
from experiments.runs import load_runs
from infreal.run import main
from infsim.__main__ import main as infsim_main
from perfmodel.journal import Together

pytest.importorskip("ray")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("ray"), pytest.mark.timeout(180)]
SWEEP = """
base:
  system: infinite-llm
  model: config.json
  gpu: cpu
  cluster: {nodes: 1, gpus_per_node: 2, intra_link: loopback, inter_link: loopback}
  instance: {blocks_per_gpu: 30, block_tokens: 4, token_budget: 64, headroom_frac: 0.0}
  scheduler: {period_s: 0.2, heartbeat_s: 0.2}
  workload: {generator: fixed, params: {input_tokens: 60, output_tokens: 40}, num_requests: 4, arrivals: saturated}
"""
LONG = "workload={generator: fixed, params: {input_tokens: 60, output_tokens: 50}, num_requests: 4000, arrivals: saturated}"


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
    load = workload([(30, 60), (40, 60), (260, 40), (20, 50)], gap_s=0.05)
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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def run_command(folder, mark, *arguments):
    command = [sys.executable, "-m", "infreal", "run", "sweep.yaml", "--out", "out", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment(mark), stderr=subprocess.PIPE, text=True)


def test_an_address_where_nobody_is(folder):
    process = run_command(folder, secrets.token_hex(8), "--ray", "127.0.0.1:1")
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert "--ray 127.0.0.1:1: no cluster answers there" in error.splitlines()[-1]


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_or_killed_command_leaves_nothing_running(folder, how):
    mark = secrets.token_hex(8)
    process = run_command(folder, mark, "--ray", "local", "--set", LONG, "--events")
    log = Path(folder, "out/runs/000-run")
    end_s = time.monotonic() + 100
    while not any(path.stat().st_size > 100_000 for path in folder.glob("out/runs/*/events.jsonl")):
        assert time.monotonic() < end_s, f"no run has begun: {list(log.parent.glob('*'))}"
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    assert len(processes(mark)) > 4
    os.kill(process.pid, how)
    error = process.communicate(timeout=60)[1]
    assert not wait_until_none(mark)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted; the same command resumes" in error.splitlines()[-1]


@pytest.mark.slow
def test_a_cluster_that_is_there_is_used_and_left_as_it_was(folder):
    """`--ray ADDRESS`: the run's actors end with it, the cluster goes on."""
    mark, port = secrets.token_hex(8), free_port()
    ray_command = Path(sys.executable).with_name("ray")
    env = environment(mark) | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    start = [ray_command, "start", "--head", f"--port={port}", "--num-cpus=3", "--include-dashboard=false", "--block"]
    server = subprocess.Popen(start, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until_answers(port)
        command = [sys.executable, "-m", "infreal", "run", "sweep.yaml", "--out", "out", "--ray", f"127.0.0.1:{port}"]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert set(load_runs(folder / "out").requests["status"]) == {"finished"}
        assert server.poll() is None
        end_s = time.monotonic() + 20
        while actors_among(processes(mark)) and time.monotonic() < end_s:
            time.sleep(0.2)
        assert not actors_among(processes(mark))
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert not wait_until_none(mark)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until_answers(port):
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.2)
        else:
            time.sleep(3)  # the node joins its head
            return
    raise AssertionError(f"nobody answers at port {port}")


def actors_among(pids):
    """Those that run an actor, by the name that Ray gives such a process."""
    found = []
    for pid in pids:
        try:
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if name.startswith(b"ray::Actor"):
            found.append(pid)
    return found
