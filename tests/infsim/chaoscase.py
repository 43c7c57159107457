"""Chaos cases: a seed's cluster, load and faults. How they are run: chaosrun."""

from dataclasses import dataclass, field, replace
from random import Random

from perfmodel.cluster import ChaosParams
from perfmodel.errors import InputError
from perfmodel.loan import CLOCK_DRIFT, check_timers
from perfmodel.messages import GMANAGER
from perfmodel.policies import PLACEMENT
from perfmodel.view import Move, SchedulerParams

INSTANCES = 3
NEVER = float("inf")
SPAN_S, SLOW_SPAN_S = 12.0, 700.0  # in which faults strike; slow: where iterations are ten times longer than a lease
FAR_BYTES_PER_S = 1e9  # between nodes: a whole instance is copied in a second
QUIET = ChaosParams()
UNHURRIED, VERY_SLOW = {"non_attention": 30.0}, {"non_attention": 2600.0}  # iterations of 0.3 s, of 25 s and more
AFTERMATH_S, SLOW_AFTERMATH_S = 5.0, 30.0  # how long a kill, an accusation or an abort counts as present
MOSTLY = ("take back", "take back", "take back", "ask back", "preempt")  # what nudges do: chaosrun.NUDGES
FAULTS = ("none", "delay", "reorder", "duplicate", "loss", "drift", "slow", "kill", "gmanager", "accuse", "abort")


class Restless:
    """Any planner: orders moves of random size between random instances."""

    often = 0.5

    def __init__(self):
        self._draw = Random(0)

    def plan(self, view):
        draw, moves = self._draw, []
        for src, load in view.loads.items():
            for movable in load.longest:
                others = [i for i in view.loads if i != src]
                if movable.movable_blocks and others and draw.random() < self.often:
                    moves.append(
                        Move(movable.req_id, src, draw.choice(others), draw.randint(1, movable.movable_blocks))
                    )
        return moves


class Seldom(Restless):
    """So seldom that there is something left to move in the midst of a long iteration."""

    often = 0.1


@dataclass(frozen=True)
class Case:
    """`requests`: (input, output) tokens; `options` go to the cluster. nudges: (time, what, instance, number), see NUDGES.
    slow: iterations are ten times longer than a lease."""

    seed: int
    chaos: ChaosParams = QUIET
    scheduler: SchedulerParams = field(default_factory=SchedulerParams)
    requests: tuple = ()
    rate_rps: float = 4.0
    patience_s: tuple | None = None
    nudges: tuple = ()
    far_bytes_per_s: float = FAR_BYTES_PER_S
    options: dict = field(default_factory=dict)

    @property
    def slow(self):
        return self.options.get("scale") == VERY_SLOW

    @property
    def lossless(self):
        """No message is lost or later than the timers allow for, nobody dies or is said to, and who is asked for memory back
        can give it within a lease: no lease ends."""
        chaos, latency_s = self.chaos, 0.001
        if self.slow or self.far_bytes_per_s < FAR_BYTES_PER_S:
            return False
        delay_s = (latency_s + chaos.delay_s) * (1 + 10 * (chaos.reorder > 0))
        try:
            check_timers(self.scheduler, 2 * delay_s)
        except InputError:
            return False
        return not (chaos.loss or chaos.kill or chaos.accuse)

    def faults(self, now_s, workload):
        """Classes of faults that are present at a time."""
        chaos, aftermath_s = self.chaos, SLOW_AFTERMATH_S if self.slow else AFTERMATH_S
        found = [name for name in ("delay_s", "reorder", "duplicate", "loss", "drift_frac") if getattr(chaos, name)]
        found = [name.partition("_")[0] for name in found] + ["slow"] * self.slow
        for at_s, machine, back_s in chaos.kill:
            if at_s <= now_s <= min(back_s, at_s + 20.0) + aftermath_s:
                found.append("gmanager" if machine == GMANAGER else "kill")
        found += ["accuse" for at_s, _ in chaos.accuse if at_s <= now_s <= at_s + aftermath_s]
        if workload.patience_s is not None:
            since_s = now_s - workload.arrival_s - workload.patience_s
            found += ["abort"] * bool(((since_s >= 0) & (since_s <= aftermath_s)).any())
        return sorted(set(found)) or ["none"]


# ---- cases -------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Load:
    """weight: how often it is drawn; span_s: when faults strike; loss, delay_s: of messages, at most; farther_bytes_per_s: between
    nodes, so that a copy takes longer than a lease; period_s: between heartbeats, and between plans."""

    weight: int
    num_requests: int
    input_tokens: tuple
    longest_output: int
    span_s: float
    loss: tuple
    delay_s: float
    farther_bytes_per_s: float
    period_s: float = 0.5
    options: dict = field(default_factory=dict)


LIGHT = Load(
    weight=34,
    num_requests=24,
    input_tokens=(50, 700),
    longest_output=150,
    span_s=SPAN_S,
    loss=(0.0, 0.1, 0.3),
    delay_s=0.5,
    farther_bytes_per_s=1e8,
)
CROWDED = replace(LIGHT, weight=26, longest_output=500)
STEADY = replace(  # most messages arrive within an iteration
    LIGHT,
    weight=20,
    longest_output=60,
    options={"token_budget": 256, "scale": UNHURRIED},
)
SLOW = Load(  # so few messages are late or lost that some loans live for many iterations
    weight=20,
    num_requests=10,
    input_tokens=(200, 500),
    longest_output=8,
    span_s=SLOW_SPAN_S,
    loss=(0.0, 0.05, 0.1),
    delay_s=1.0,
    farther_bytes_per_s=4e6,
    period_s=2.0,
    options={"token_budget": 1024, "scale": VERY_SLOW, "placement": Seldom},
)
LOADS = (LIGHT, CROWDED, STEADY, SLOW)


def draw_kills(draw, span_s):
    """The gManager up to twice, always to return; an instance or two, of which one may stay away."""
    kills = []
    for begin_s in (0.2, span_s / 2):
        if draw.random() < 0.4:
            at_s = draw.uniform(begin_s, begin_s + span_s / 3)
            kills.append((at_s, GMANAGER, at_s + draw.uniform(0.04, 0.15) * span_s))
    victims = draw.sample(range(INSTANCES), draw.choice([0, 0, 0, 1, 1, 2]))
    for i, victim in enumerate(victims):
        at_s = draw.uniform(0.2, span_s)
        forever = i == 0 and draw.random() < 0.15
        kills.append((at_s, victim, NEVER if forever else at_s + draw.uniform(0.5, 20.0)))
    return tuple(kills)


def draw_accusations(draw, span_s):
    return tuple((draw.uniform(0.5, span_s), draw.randrange(INSTANCES)) for _ in range(draw.randint(2, 8)))


def draw_chaos(draw, load):
    if draw.random() < 0.15:
        return QUIET
    return ChaosParams(
        delay_s=draw.choice([0.0, 0.01, 0.05, load.delay_s]),
        reorder=draw.choice([0.0, 0.2]),
        duplicate=draw.choice([0.0, 0.2]),
        loss=draw.choice(load.loss),
        kill=draw_kills(draw, load.span_s),
        accuse=draw_accusations(draw, load.span_s) if draw.random() < 0.45 else (),
        detect_s=draw.choice([0.05, 1.0, 5.0]),
        drift_frac=draw.choice([0.0, CLOCK_DRIFT]),
    )


def draw_requests(draw, load, longest_tokens):
    """Short ones, and up to three that need more than an instance."""
    requests = [
        (draw.randrange(*load.input_tokens), draw.randrange(1, load.longest_output)) for _ in range(load.num_requests)
    ]
    for _ in range(draw.randrange(4)):
        long = (draw.randrange(longest_tokens // 2, longest_tokens), draw.randrange(1, load.longest_output))
        requests.insert(draw.randrange(len(requests)), long)
    return tuple(requests)


def draw_patience(draw, count, span_s):
    if draw.random() < 0.7:
        return None
    return tuple(draw.expovariate(2 / span_s) if draw.random() < 0.4 else NEVER for _ in range(count))


def draw_nudges(draw, chaos, span_s):
    """Creditors that want memory back, debtors that take it back and a gManager that preempts, at any time and after losses."""
    if draw.random() < 0.25:
        return ()
    return tuple(
        (draw_moment(draw, chaos, span_s), draw.choice(MOSTLY), draw.randrange(INSTANCES), draw.randint(1, 60))
        for _ in range(120)
    )


def draw_moment(draw, chaos, span_s):
    losses_s = [at_s for at_s, *_ in (*chaos.kill, *chaos.accuse)]
    return draw.choice([draw.uniform(0.5, span_s), *(at_s + draw.uniform(0, span_s / 3) for at_s in losses_s)])


def draw_scheduler(draw, load):
    return SchedulerParams(
        lease_s=2.5,
        renew_s=0.4,
        order_ttl_s=load.period_s * draw.choice([1, 6]),
        period_s=load.period_s,
        heartbeat_s=load.period_s,
        lent_cap_frac=draw.choice([0.2, 0.5, 0.9]),
        move_tokens_per_iteration=0 if load.options else draw.choice([16, 0]),
    )


def draw_options(draw, load):
    """Cluster: small instances that are close to each other, or far apart on links where a move takes seconds."""
    return {
        "num_blocks": draw.choice([95, 100]),
        "headroom_frac": draw.choice([0.0, 0.01, 0.1]),
        "macro": draw.random() < 0.7,
        "batching": "chunked" if load.options else draw.choice(["chunked", "prefill-first"]),
        "placement": draw.choice([Restless, Restless, Seldom, PLACEMENT["greedy"], PLACEMENT["reactive"]]),
        "nodes": draw.choice([(0,) * INSTANCES, tuple(range(INSTANCES)), tuple(range(INSTANCES))]),
        **load.options,
    }


def chaos_case(seed):
    """The case of one seed."""
    draw = Random(seed)
    (load,) = draw.choices(LOADS, [load.weight for load in LOADS])
    chaos = draw_chaos(draw, load)
    lost_forever = any(back_s == NEVER for _, _, back_s in chaos.kill)
    requests = draw_requests(draw, load, longest_tokens=1500 if lost_forever else 2700)
    return Case(
        seed,
        chaos,
        draw_scheduler(draw, load),
        requests,
        rate_rps=draw.choice([1.0, 4.0, 20.0]),
        patience_s=draw_patience(draw, len(requests), load.span_s),
        nudges=draw_nudges(draw, chaos, load.span_s),
        far_bytes_per_s=draw.choice([FAR_BYTES_PER_S, load.farther_bytes_per_s, load.farther_bytes_per_s]),
        options=draw_options(draw, load),
    )
