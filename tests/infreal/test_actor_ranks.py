"""Instances of several ranks in threads, each with its shard: the tokens of one rank, whatever is placed, moved or lost."""

from dataclasses import replace

import pytest
from actor_tools import ActorRun
from pool_tools import QUICK, WIDE, Restless, cluster, wide_decoder, workload

from experiments.hf_config import model_from_config

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]
SOON = replace(QUICK, lease_s=1.2, renew_s=0.2, order_ttl_s=1.0)
MODEL = model_from_config("wide", WIDE, where="wide")
SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


def run_of(num_ranks, num_instances, num_blocks, load, deadline_s=20.0, **changes):
    spec = cluster(num_instances, num_blocks, MODEL, tensor_parallel=num_ranks, **changes)
    return ActorRun(spec, load, wide_decoder(), wide_decoder, deadline_s=deadline_s)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_single_instance_serves_a_batch(num_ranks):
    load = workload([(30, 12), (7, 20), (41, 1)], gap_s=0.01)
    run_of(num_ranks, 1, 60, load, placement=None).finish().assert_exact()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_prompt_that_spans_all_instances(num_ranks):
    """Each rank reads from the same rank elsewhere; with four, two hold the same KV head."""
    run = run_of(num_ranks, 2, 16, workload([(2 * 16 * 4 - 40, 24)])).finish()
    run.assert_exact()
    assert run.result.requests["remote_tokens_max"][0] >= 16 * 4 - 40


@pytest.mark.parametrize("num_ranks", SIZES)
def test_moves_in_mid_decode(num_ranks):
    load = workload([(20 + 5 * i, 60) for i in range(4)], gap_s=0.02)
    run = run_of(num_ranks, 2, 400, load, placement=Restless).finish()
    run.assert_exact()
    assert run.count("throughput") >= 3


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_lost_and_with_it_the_instance(num_ranks, rank):
    """The others are told, and all its ranks are made anew."""
    load = workload([(40, 120)] * 4)
    run = run_of(num_ranks, 2, 260, load, deadline_s=3.0, placement=Restless, scheduler=SOON)
    run.at(0.4, lambda run: run.fleet.lose_rank(1, rank))
    run.finish().assert_exact()
    assert [run.head.members[i].incarnation for i in (0, 1)] == [1, 2]
