"""What pricing one iteration costs a simulation, fitted laws against the analytic roofline they replaced."""

import time

import pytest

from experiments.catalogue import load_engine, load_gpu, load_link, load_model
from experiments.packs import cost_model
from perfmodel.specs import InstanceSpec

STEPS = 20_000


def price_a_run(pack: str | None) -> float:
    """Seconds for the questions of a run: growing batches, a chunk now and then, the first look-ups included."""
    links = load_link("nvlink3"), load_link("ethernet-100g")
    spec = InstanceSpec(load_model("llama2-70b"), load_gpu("a100-80gb"), load_engine("graphs"), *links, 2)
    cost = cost_model(spec, pack)
    started_s = time.process_time()
    for step in range(STEPS):
        rows = 1 + step % 200
        cost.iteration_terms(rows + step % 3 * 512, rows, rows)
        cost.decode_attention_terms(rows)
        cost.iteration_basis(rows, rows, rows * 640)
        if step % 3:
            cost.prefill_attention_s(512, step % 7 * 512)
    return time.process_time() - started_s


@pytest.mark.bench
def test_pricing_is_not_slower_than_the_roofline():
    pairs = [(price_a_run(None), price_a_run("analytic")) for _ in range(7)]
    fitted_s, analytic_s = (min(times) for times in zip(*pairs, strict=True))
    per_step = [f"{1e6 * seconds / STEPS:.2f} µs" for seconds in (fitted_s, analytic_s)]
    print(f"\npricing a step: {per_step[0]} fitted, {per_step[1]} analytic, ratio {fitted_s / analytic_s:.2f}")
    assert fitted_s / analytic_s < 1.6, "first look-ups included"
    assert fitted_s / STEPS < 30e-6
