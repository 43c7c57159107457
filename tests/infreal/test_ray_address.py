"""`infreal run --ray ADDRESS`: on a cluster of two nodes that is there, with its token; it is left as it was."""

import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray_tools import end_by, environment, processes, start_long_run, start_run, wait_until_none

from experiments import raycluster
from experiments.runs import load_runs
from perfmodel.errors import InputError

pytest.importorskip("ray")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("ray"), pytest.mark.timeout(180)]
NUM_NODES = 2
WAIT_FOR_NODES = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(0.1)
"""


def test_a_port_where_something_else_listens(monkeypatch):
    monkeypatch.setattr(raycluster, "PROBE_S", 1.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(InputError, match=rf"--ray {address}: no cluster answers there within 1 s"):
            raycluster.check_accepts(address)


class Cluster:
    """Its processes carry the mark; env: of a process that may connect to it."""

    def __init__(self):
        self.mark, self.address, self._nodes = secrets.token_hex(8), f"127.0.0.1:{free_port()}", []
        self.env = environment(self.mark) | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def start_node(self, *arguments):
        ray_command = Path(sys.executable).with_name("ray")
        common = ["--num-cpus=1", "--object-store-memory=100000000", "--block"]
        command = [ray_command, "start", *arguments, *common]
        self._nodes.append(subprocess.Popen(command, env=self.env, stdout=subprocess.DEVNULL))

    def wait_for_nodes(self):
        command = [sys.executable, "-c", WAIT_FOR_NODES, self.address, str(NUM_NODES)]
        subprocess.run(command, env=self.env, timeout=90, check=True)

    def has_all_nodes(self):
        return len(self._nodes) == NUM_NODES and all(node.poll() is None for node in self._nodes)

    def actors(self):
        """Ids of the processes that run an actor, by the name that Ray gives such a process."""
        return [pid for pid in processes(self.mark) if command_line(pid).startswith(b"ray::Actor")]

    def wait_until_free(self):
        """Actors that are left after a while."""
        end_s = time.monotonic() + 30
        while (left := self.actors()) and time.monotonic() < end_s:
            time.sleep(0.2)
        return left

    def close(self):
        for node in reversed(self._nodes):
            node.terminate()
        for node in self._nodes:
            node.wait(60)


@contextmanager
def two_nodes():
    """An instance has room on each. Afterwards no process of the cluster is left."""
    cluster = Cluster()
    try:
        port = cluster.address.rpartition(":")[2]
        cluster.start_node("--head", f"--port={port}", "--include-dashboard=false")
        until_answers(int(port))
        cluster.start_node(f"--address={cluster.address}")
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.close()
    assert not wait_until_none(cluster.mark)


@pytest.fixture(scope="module")
def nodes():
    with two_nodes() as cluster:
        yield cluster


@pytest.mark.slow
def test_instances_on_two_nodes(nodes, folder):
    """Each node has room for one. The run's actors end with it, the cluster goes on."""
    process = start_run(folder, nodes.env, "--ray", nodes.address)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 0, error
    assert set(load_runs(folder / "out").requests["status"]) == {"finished"}
    assert not nodes.wait_until_free()
    assert nodes.has_all_nodes()


@pytest.mark.slow
def test_no_room_for_three(nodes, folder):
    process = start_run(folder, nodes.env, "--ray", nodes.address, "--set", "cluster.gpus_per_node=3")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert "3 instances need 3 CPUs, the cluster has 2" in error.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_command_leaves_no_actor(nodes, folder, how):
    process = start_long_run(folder, nodes.env, "--ray", nodes.address)
    assert len(nodes.actors()) == 4, "two instances, gManager and dispatcher"
    end_by(process, how)
    assert not nodes.wait_until_free()
    assert nodes.has_all_nodes()


@pytest.mark.slow
@pytest.mark.parametrize("token", [None, secrets.token_hex(32)], ids=["missing", "wrong"])
def test_a_token_that_the_cluster_does_not_know(nodes, folder, token):
    env = {name: value for name, value in nodes.env.items() if not name.startswith("RAY_AUTH")} | {"HOME": str(folder)}
    if token is not None:
        env["RAY_AUTH_TOKEN"] = token
    process = start_run(folder, env, "--ray", nodes.address)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert len(error.splitlines()) == 1
    assert f"--ray {nodes.address}: the cluster's authentication token is missing or wrong" in error


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
            return
    raise AssertionError(f"nobody answers at port {port}")


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
