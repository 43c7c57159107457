"""Prices of steps whose requests read elsewhere: what is hidden, what is waited for, what a busy creditor keeps for itself."""

from dataclasses import replace

import pytest

from experiments.catalogue import load_engine, load_gpu, load_link, load_model
from perfmodel.cost import CostModel
from perfmodel.curves import analytic_curves
from perfmodel.messages import Chunk, StartIterations
from perfmodel.pricing import Surroundings, price_step, served_s
from perfmodel.specs import InstanceSpec
from perfmodel.view import RemoteRead

NVLINK = load_link("nvlink3")


@pytest.fixture(scope="module")
def cost():
    spec = InstanceSpec(load_model("llama2-7b"), load_gpu("a100-80gb"), load_engine("graphs"), NVLINK, NVLINK)
    return CostModel(spec, analytic_curves(spec.gpu, spec.model.dtype_bytes))


def around(iteration_s=0.0, share=0.0):
    return Surroundings(share, lambda peer: NVLINK, lambda peer: iteration_s)


def decode(context_tokens, *remote):
    return StartIterations(1, 8, context_tokens, context_tokens, (), 1, (), (), remote=remote)


def chunk(*remote):
    chunks = (Chunk(7, 2048, 200_000, last=False, remote_tokens=200_000),)
    return StartIterations(1, 0, 0, 0, chunks, 1, (), (), chunk_remote=remote)


def wait_s(cost, step, surroundings):
    price = price_step(cost, step, surroundings)
    return price.time.total_s(1) - price.alone.total_s(1)


def test_what_the_rest_of_the_system_takes_of_a_core_makes_iterations_longer(cost):
    engine = replace(cost.instance.engine, background_frac=0.2, launch_s_per_layer=0.0, iteration_s=0.0, row_s=0.0)
    slowed, free = (
        CostModel(replace(cost.instance, engine=replace(engine, background_frac=frac)), cost.curves)
        for frac in (0.2, 0.0)
    )
    slow_s, free_s = (price_step(c, decode(10_000), around()).time.total_s(1) for c in (slowed, free))
    assert slow_s == pytest.approx(free_s / 0.8)


def test_remote_attention_is_hidden_behind_local_attention(cost):
    assert wait_s(cost, decode(200_000, RemoteRead(1, 1, 4_000)), around()) == 0.0
    assert wait_s(cost, decode(4_000, RemoteRead(1, 1, 200_000)), around()) > 0.01


def test_creditors_compute_at_the_same_time(cost):
    one = wait_s(cost, chunk(RemoteRead(1, 2048, 200_000)), around())
    two = wait_s(cost, chunk(RemoteRead(1, 2048, 100_000), RemoteRead(2, 2048, 100_000)), around())
    assert 0.45 * one < two < 0.6 * one


def test_a_creditor_with_own_requests_gives_a_third_of_its_time_to_a_prompt(cost):
    step = chunk(RemoteRead(1, 2048, 200_000))
    idle_s, busy_s = (price_step(cost, step, around(iteration_s)).time.total_s(1) for iteration_s in (0.0, 0.02))
    assert busy_s > 2.5 * idle_s
    assert served_s(cost, step, 1) / busy_s <= 1 / 3
