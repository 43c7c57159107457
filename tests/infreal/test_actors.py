"""Hosts in threads: the same tokens as one instance, whatever is placed, moved, lost or brought back."""

import pytest
from actor_tools import ActorRun
from pool_tools import Restless, cluster, workload

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]


def test_a_single_instance_serves_a_batch():
    ActorRun(cluster(1, 60, placement=None), workload([(30, 12), (7, 20), (41, 1)], gap_s=0.01)).finish().assert_exact()


@pytest.mark.parametrize("num_instances", [2, 3])
def test_a_prompt_that_spans_all_instances(num_instances):
    run = ActorRun(cluster(num_instances, 16), workload([(num_instances * 16 * 4 - 40, 24)])).finish()
    run.assert_exact()
    assert run.result.requests["remote_tokens_max"][0] >= (num_instances - 1) * 16 * 4 - 40


@pytest.mark.slow
def test_moves_in_mid_decode():
    load = workload([(20 + 5 * i, 90) for i in range(6)], gap_s=0.02)
    run = ActorRun(cluster(3, 400, placement=Restless), load).finish()
    run.assert_exact()
    assert run.count("throughput") >= 5
