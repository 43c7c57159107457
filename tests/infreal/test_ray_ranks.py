"""Instances of two ranks as Ray actors: the tokens of one rank, whichever rank fails, and nothing is left."""

import signal
from dataclasses import replace
from functools import partial

import pytest
from pool_tools import QUICK, WIDE, Restless, cluster, wide_decoder, workload
from ray_tools import RayRun, local_ray, send_signal

from experiments.hf_config import model_from_config
from experiments.runs import load_runs
from infreal.run import main

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(180),
    pytest.mark.slow,
]
MODEL = model_from_config("wide", WIDE, where="wide")
SOON = replace(QUICK, lease_s=2.0, renew_s=0.3, order_ttl_s=1.0)
MAKE = partial(cluster, 2, 260, MODEL, tensor_parallel=2, placement=Restless, scheduler=SOON)


@pytest.fixture(scope="module")
def cluster_of_four():
    with local_ray(num_cpus=4) as mark:
        yield mark


def test_prompts_over_two_instances_and_moves(cluster_of_four):
    make_spec = partial(cluster, 2, 60, MODEL, tensor_parallel=2, placement=Restless)
    load = workload([(30, 60), (40, 60), (260, 40), (20, 50)], gap_s=0.05)
    run = RayRun(make_spec, load, make_decoder=wide_decoder, prepare=None).finish()
    run.assert_exact()
    assert run.count("throughput") > 0
    assert run.count("capacity") > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_fails_in_mid_step(cluster_of_four, rank, number):
    """Killed, or stopped and found silent: the instance is ended with all its ranks and returns."""
    load = workload([(30, 300), (44, 300), (20, 300), (60, 300)], gap_s=0.02)
    deadline_s = 6.0 if number == signal.SIGSTOP else 30.0
    run = RayRun(MAKE, load, deadline_s=deadline_s, make_decoder=wide_decoder, prepare=None)
    run.at(1.0, send_signal, 1, number, rank)
    run.finish().assert_exact()
    assert [member.deaths for member in run.head._instances()] == [0, 1]


def test_the_command(cluster_of_four, folder, capsys):
    """Four actors for two instances; the same folder as with one rank."""
    options = ("--set", "instance.tensor_parallel=2", "--set", "cluster.gpus_per_node=4", "--ray", "local")
    assert main(["sweep.yaml", "--out", "out", *options]) == 0
    assert "2 × TP2" in capsys.readouterr().out
    assert set(load_runs("out").requests["status"]) == {"finished"}


def test_more_ranks_than_the_cluster_holds(cluster_of_four, folder, capsys):
    options = ("--set", "instance.tensor_parallel=2", "--set", "cluster.gpus_per_node=6", "--ray", "local")
    assert main(["sweep.yaml", "--out", "out", *options]) == 2
    assert "--ray: 3 instances need 6 CPUs, the cluster has 4" in capsys.readouterr().err.splitlines()[-1]
