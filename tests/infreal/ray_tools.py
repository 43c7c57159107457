"""Runs on Ray for tests: a marked environment, so that every process of a run can be found, and runs with NaN in free blocks."""

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from actor_tools import poison
from pool_tools import Prompts, reference, tiny_decoder

from experiments import raycluster
from infreal.actors.run import RayOptions, make_head
from infreal.requests import Requests
from infreal.transport.group import ALONE

MARK = "INFREAL_TEST_MARK"
HERE = str(Path(__file__).parent)
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


def processes(mark):
    """Ids of the living processes whose environment holds the mark, this one apart."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                environment = (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environment.split(b"\0") and state != "Z":
                found.append(int(folder.name))
    return found


def wait_until_none(mark, timeout_s=30.0):
    """Processes that are left after that time."""
    end_s = time.monotonic() + timeout_s
    while (left := processes(mark)) and time.monotonic() < end_s:
        time.sleep(0.1)
    return left


def environment(mark):
    """Of a process that starts Ray: children carry the mark, and find the tests' modules."""
    paths = [str(Path(HERE).parents[1]), HERE, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def local_ray(num_cpus):
    """A local cluster; afterwards no process of it is left."""
    import ray

    mark, before = secrets.token_hex(8), dict(os.environ)
    os.environ.update(environment(mark))
    try:
        with raycluster.connected("local", num_cpus):
            yield mark
            ray.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert not wait_until_none(mark)


@dataclass
class RayRun:
    """A run on the cluster that is connected. make_spec: by whom actors make the spec too · make_decoder(group): of a rank."""

    make_spec: object
    load: object
    observer: object = None
    deadline_s: float = 30.0
    make_decoder: object = lambda group=ALONE: tiny_decoder()
    prepare: object = poison
    pids: dict = field(default_factory=dict)

    def __post_init__(self):
        self.decoder, self.spec = self.make_decoder(), self.make_spec()
        self.prompts = Prompts(self.load, self.decoder.config.vocab_size)
        options = RayOptions(deadline_s=self.deadline_s, check=True, prepare=self.prepare)
        requests = Requests(self.load, self.prompts)
        self.head = make_head(self.make_spec, self.make_decoder, requests, self.observer, options)
        self.fleet = self.head.fleet

    def at(self, time_s, what, *args):
        self.head._at(time_s, partial(what, self, *args))

    def finish(self):
        self.result = self.head.run()
        return self

    def count(self, kind, outcome="committed"):
        moves = self.result.moves
        return list(zip(moves["kind"], moves["outcome"], strict=True)).count((kind, outcome))

    def assert_exact(self):
        """Everything has finished with the tokens of one instance, and every block of every live instance is free."""
        assert set(self.result.requests["status"]) == {"finished"}, self.result.requests["reason"]
        for req_id in range(len(self.load)):
            expected = reference(self.decoder, self.prompts(req_id), int(self.load.output_tokens[req_id]))[0]
            assert self.head.outputs[req_id] == expected, f"request {req_id}"
        self.assert_free()

    def assert_free(self):
        for member in self.head._instances():
            if member.alive:
                assert member.state.sample.free_blocks == self.spec.num_blocks, member


def send_signal(run, address, number=signal.SIGKILL, rank=0):
    os.kill(run.fleet.pid_of(address, rank), number)


def start_run(folder, env, *arguments):
    command = [sys.executable, "-m", "infreal", "run", "sweep.yaml", "--out", "out", *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


def start_long_run(folder, env, *arguments):
    """Returns when requests are under way."""
    process = start_run(folder, env, *arguments, "--set", LONG, "--events")
    end_s = time.monotonic() + 100
    while not any(path.stat().st_size > 100_000 for path in folder.glob("out/runs/*/events.jsonl")):
        assert time.monotonic() < end_s, "no run has begun"
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    return process


def end_by(process, number):
    """A signal ends a command as it should."""
    os.kill(process.pid, number)
    error = process.communicate(timeout=60)[1]
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted; the same command resumes" in error.splitlines()[-1]
