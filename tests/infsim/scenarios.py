"""Families of chaos cases that bring out one thing each; every seed must hold, and some seed must catch each mutant."""

from dataclasses import replace
from random import Random

from chaoscase import INSTANCES, MOSTLY, QUIET, VERY_SLOW, Case, Restless, Seldom

from perfmodel.cluster import ChaosParams
from perfmodel.policies.placement import NoPlacement
from perfmodel.view import SchedulerParams

TIMERS = SchedulerParams(
    lease_s=2.5, renew_s=0.4, period_s=0.5, heartbeat_s=0.5, move_tokens_per_iteration=0, lent_cap_frac=0.9
)
NEAR = {"num_blocks": 100, "placement": Restless, "headroom_frac": 0.0}
UNHURRIED = replace(TIMERS, period_s=2.0, heartbeat_s=2.0)
SLOW = {**NEAR, "token_budget": 1024, "scale": VERY_SLOW}


def requests_of(seed, count, inputs, outputs):
    draw = Random(seed)
    return tuple((draw.randrange(*inputs), draw.randrange(*outputs)) for _ in range(count))


def quiet(seed):
    """No faults: moves of requests that decode for longer than a lease."""
    return Case(seed, QUIET, TIMERS, requests_of(seed, 12, (100, 500), (300, 600)), options=NEAR)


def far(seed):
    """A move takes longer than the time between two orders."""
    options = {**NEAR, "nodes": (0, 1, 2)}
    return Case(
        seed, QUIET, TIMERS, requests_of(seed, 12, (100, 500), (300, 600)), far_bytes_per_s=1e8, options=options
    )


def cut_short(seed):
    """… and many clients go away meanwhile."""
    draw, case = Random(seed), far(seed)
    return replace(case, patience_s=tuple(draw.uniform(0.5, 3.0) for _ in case.requests))


def late(seed):
    """Messages overtake each other by up to two leases, and most are lost."""
    chaos = ChaosParams(delay_s=0.5, reorder=0.3, loss=0.6, duplicate=0.2)
    return Case(seed, chaos, TIMERS, requests_of(seed, 12, (100, 500), (300, 600)), options=NEAR)


def crossing(seed):
    """Iterations ten times longer than a lease, in the midst of which blocks move in all directions and peers are given up."""
    draw, requests = Random(seed), requests_of(seed, 6, (300, 500), (5, 9))
    accuse = tuple((draw.uniform(150, 350), draw.randrange(INSTANCES)) for _ in range(6))
    nudges = tuple(
        (draw.uniform(150, 350), draw.choice(MOSTLY), draw.randrange(INSTANCES), draw.randint(1, 60)) for _ in range(80)
    )
    chaos, options = ChaosParams(accuse=accuse, detect_s=0.5), {**SLOW, "placement": Seldom}
    return Case(seed, chaos, UNHURRIED, requests, rate_rps=20.0, nudges=nudges, options=options)


def long_iterations(seed):
    """Iterations ten times longer than a lease, and no faults: leases are kept by managers, not by iterations."""
    return Case(
        seed, QUIET, TIMERS, requests_of(seed, 6, (300, 500), (8, 10)), 20.0, options={**SLOW, "placement": Seldom}
    )


def restarts(seed):
    """An instance dies in the midst of moves and is back long before the leases of what it had borrowed are over."""
    draw = Random(seed)
    at_s = draw.uniform(0.8, 1.5)
    chaos = ChaosParams(kill=((at_s, draw.randrange(INSTANCES), at_s + 0.3),), detect_s=0.2)
    timers = replace(TIMERS, lease_s=20.0)
    return Case(seed, chaos, timers, requests_of(seed, 30, (100, 500), (100, 600)), 8.0, options=NEAR)


def prompts(seed):
    """Prompts larger than an instance compete for the pool, and orders are lost."""
    long = requests_of(seed, 6, (1700, 2500), (1, 50))
    chaos = ChaosParams(delay_s=0.05, loss=0.1)
    options = {**NEAR, "placement": NoPlacement}
    return Case(seed, chaos, TIMERS, long + requests_of(seed, 6, (100, 900), (1, 50)), 20.0, options=options)


def tight(seed):
    """Little may be lent: prompts up to a large headroom, moves up to a small cap."""
    timers = replace(TIMERS, lent_cap_frac=0.2)
    requests = requests_of(seed, 3, (1700, 2200), (1, 50)) + requests_of(seed, 12, (100, 500), (100, 300))
    return Case(seed, QUIET, timers, requests, options={**NEAR, "headroom_frac": 0.1})


def orphans(seed):
    """A debtor dies for good; what it had borrowed comes back."""
    chaos = ChaosParams(
        kill=((Random(seed).uniform(1, 4), Random(seed).randrange(INSTANCES), float("inf")),), detect_s=0.2
    )
    return Case(seed, chaos, TIMERS, requests_of(seed, 12, (100, 500), (100, 600)), options=NEAR)
