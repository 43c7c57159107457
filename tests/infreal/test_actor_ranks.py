"""Instances of several ranks in threads, each with the whole model: all do the same, and the tokens are those of one."""

import pytest
from actor_tools import ActorRun
from pool_tools import Restless, cluster, workload

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]


def test_a_single_instance_serves_a_batch():
    spec = cluster(1, 60, placement=None, tensor_parallel=2)
    ActorRun(spec, workload([(30, 12), (7, 20), (41, 1)], gap_s=0.01)).finish().assert_exact()


def test_a_prompt_that_spans_all_instances():
    run = ActorRun(cluster(2, 16, tensor_parallel=2), workload([(2 * 16 * 4 - 40, 24)])).finish()
    run.assert_exact()
    assert run.result.requests["remote_tokens_max"][0] >= 16 * 4 - 40


def test_moves_in_mid_decode():
    load = workload([(20 + 5 * i, 60) for i in range(4)], gap_s=0.02)
    run = ActorRun(cluster(2, 400, placement=Restless, tensor_parallel=2), load).finish()
    run.assert_exact()
    assert run.count("throughput") >= 3
