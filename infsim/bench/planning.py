"""Case f: clusters on which most debtors have a move worth making, and how long Algorithm 1 takes to find them.

`python -m infsim.bench.planning INSTANCES` prints its figures as JSON.
"""

import json
import sys
from functools import partial
from time import process_time

import numpy as np

from experiments.catalogue import load_engine, load_gpu, load_link, load_model
from experiments.packs import cost_model
from perfmodel.policies.greedy import Greedy
from perfmodel.specs import InstanceSpec, LinkSpec
from perfmodel.view import ClusterView, Load, Movable, SchedulerParams

BLOCKS, BLOCK_TOKENS, HEADROOM = 8_000, 16, 80
REPEATS = 5


def pressed_view(count: int) -> ClusterView:
    """Half of the instances hold a long request and 20 waiting prompts each, half work at short ones."""
    near, far = load_link("nvlink3"), load_link("ethernet-100g")
    spec = InstanceSpec(load_model("llama2-7b"), load_gpu("a100-80gb"), load_engine("graphs"), near, far)
    rng = np.random.default_rng(0)
    loads = {i: debtor(i, rng) if i % 2 else creditor(rng) for i in range(count)}
    link = partial(link_between, near, far)
    return ClusterView(loads, cost_model(spec, None), SchedulerParams(), BLOCK_TOKENS, link)


def debtor(req_id: int, rng: np.random.Generator) -> Load:
    tokens = int(rng.integers(60_000, 105_000))
    waiting = tuple(int(n) for n in rng.integers(50, 600, 20))
    longest = (Movable(req_id, tokens, tokens // BLOCK_TOKENS),)
    return Load(BLOCKS, 100, 0, 0, HEADROOM, 1, tokens, (), (), waiting, longest, iteration_s=0.045)


def creditor(rng: np.random.Generator) -> Load:
    free, batch = int(rng.integers(3_000, 6_000)), int(rng.integers(65, 200))
    longest = (Movable(-1, 900, 56),)
    return Load(BLOCKS, free, 0, 0, HEADROOM, batch, 32_000, (), (), (), longest, iteration_s=0.025)


def link_between(near: LinkSpec, far: LinkSpec, a: int, b: int) -> LinkSpec:
    """Eight instances to a node."""
    return near if a // 8 == b // 8 else far


def measure(count: int) -> dict[str, float]:
    """Seconds of CPU of the quickest of a few plans."""
    view, best_s, moves = pressed_view(count), float("inf"), 0
    for _ in range(REPEATS):
        start_s = process_time()
        moves = len(Greedy().plan(view))
        best_s = min(best_s, process_time() - start_s)
    return {"plan_ms": best_s * 1e3, "moves": moves}


if __name__ == "__main__":
    json.dump(measure(int(sys.argv[1])), sys.stdout)
