"""What a sweep says on the terminal: a table, and three lines: which is best by goodput, why, and how far to trust it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from experiments.points import BASES, Manifest, Point, mean, paired_difference, points_of, rival
from experiments.sweepfile import label
from perfmodel.metrics import BREAKDOWN

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Column:
    """A metric in the table. Columns of low `rank` leave first where the terminal is narrow."""

    header: str
    metric: str
    scale: float = 1.0
    rank: int = 9


PAIRED = "goodput_rps, paired"  # not a metric of one run
GOODPUT = Column("goodput\nreq/s", "goodput_rps")
COLUMNS = (
    Column("tok/s", "output_tok_per_s"),
    Column("TTFT\np50 s", "ttft_s_p50", rank=4),
    Column("TTFT\np99 s", "ttft_s_p99"),
    Column("TPOT\np50 ms", "tpot_s_p50", 1e3, rank=3),
    Column("TPOT\np99 ms", "tpot_s_p99", 1e3),
    Column("in SLO\n%", "slo_attainment_frac", 1e2, rank=8),
    GOODPUT,
    Column("KV\n%", "kv_util_frac", 1e2, rank=5),
    Column("compute\n%", "compute_util_frac", 1e2, rank=2),
    Column("batch", "batch_mean", rank=6),
    Column("moves", "num_moves", rank=7),
    Column("rejected", "num_rejected"),
    Column("served\n% tokens", "served_token_frac", 1e2, rank=8),
)


@dataclass(frozen=True)
class Reason:
    """A metric that may explain a lead: how it is said."""

    metric: str
    text: Callable[[float, float], str]


REASONS = (
    Reason("batch_mean", lambda a, b: f"mean batch {number(a)} against {number(b)} rows an instance"),
    Reason("kv_util_frac", lambda a, b: f"KV in use {number(100 * a)} against {number(100 * b)} %"),
    Reason("compute_util_frac", lambda a, b: f"compute in use {number(100 * a)} against {number(100 * b)} %"),
    Reason("queue_s", lambda a, b: f"queueing {number(a)} against {number(b)} s a request"),
    Reason("tpot_s_p50", lambda a, b: f"median TPOT {number(a * 1e3)} against {number(b * 1e3)} ms"),
    Reason("remote_wait_s", lambda a, b: f"remote wait {number(a)} against {number(b)} s a request"),
    Reason("preempted_s", lambda a, b: f"preempted {number(a)} against {number(b)} s a request"),
    Reason("num_rejected", lambda a, b: f"rejected {number(a)} against {number(b)}"),
)
NUM_REASONS = 4


def table_of(manifests: Sequence[Manifest], width: int) -> "Table":
    """One row a point, means over replicates with their 95 % intervals; at most `width` wide where that can be."""
    from rich.console import Console

    points = points_of(manifests)
    columns = [c for c in COLUMNS if c.metric != "num_moves" or any(p.mean("num_moves") for p in points)]
    if any(len(point.manifests) > 1 and rival(point, points) for point in points):
        columns.insert(columns.index(GOODPUT) + 1, Column(f"goodput less\n{points[0].contender}", PAIRED))
    console = Console(width=1000)
    table = build_table(points, columns)
    while console.measure(table).maximum > width and min(c.rank for c in columns) < 9:
        columns.remove(min(columns, key=lambda c: c.rank))
        table = build_table(points, columns)
    return table


def build_table(points: Sequence[Point], columns: Sequence[Column]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    axes = list(points[0].axes) if points else []
    for axis in axes:
        table.add_column(axis.replace(".", "\n", 1), no_wrap=True)
    for column in columns:
        table.add_column(column.header, justify="right", no_wrap=True)
    contenders = [point.contender for point in points]
    for i, point in enumerate(points):
        values = [label(point.axes[axis]) for axis in axes]
        ends_group = i + 1 < len(points) and contenders[i + 1] != contenders[i]
        cells = [paired_cell(point, points) if c.metric == PAIRED else cell(point, c) for c in columns]
        table.add_row(*values, *cells, end_section=ends_group)
    return table


def paired_cell(point: Point, points: Sequence[Point]) -> str:
    """The difference to the first contender, seed by seed, with its 95 % interval."""
    other = rival(point, points)
    if other is None:
        return ""
    difference, width = paired_difference(point, other, "goodput_rps")
    return f"{'+' * (difference > 0)}{number(difference)}{f' ±{number(width)}' if isfinite(width) else ''}"


def cell(point: Point, column: Column) -> str:
    value, width = point.mean(column.metric) * column.scale, point.half_width(column.metric) * column.scale
    return f"{number(value)}{f' ±{number(width)}' if isfinite(width) else ''}"


def number(value: float) -> str:
    """Three significant digits; whole numbers from 100 on."""
    if not isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 99.95 or value == int(value) else f"{value:#.3g}"


def closing_lines(manifests: Sequence[Manifest]) -> list[str]:
    """Best, why, trust."""
    points = points_of(manifests)
    if not points:
        return ["Best by goodput: none, every run failed.", "Why: see above.", "Trust: nothing was simulated."]
    duels = [duel for scenario in by_scenario(points) if (duel := duel_of(scenario))]
    return [
        f"Best by goodput: {best_line(points, duels)}",
        f"Why: {why_line(points, duels)}",
        f"Trust: {trust_line(points)}",
    ]


@dataclass(frozen=True)
class Duel:
    """Best points of a scenario's best two contenders. `same_load`: the second one at the load of the first."""

    best: Point
    next_best: Point
    same_load: Point

    @property
    def lead(self) -> float:
        """Ratio of goodputs, each at its best load."""
        other = self.next_best.mean("goodput_rps")
        return self.best.mean("goodput_rps") / other if other else float("inf")


def by_scenario(points: Sequence[Point]) -> list[list[Point]]:
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.scenario, []).append(point)
    return list(groups.values())


def best_of(points: Sequence[Point]) -> Point:
    """Highest goodput; among equals the first."""
    return max(points, key=goodput)


def goodput(point: Point) -> float:
    value = point.mean("goodput_rps")
    return value if isfinite(value) else -1.0


def duel_of(points: Sequence[Point]) -> Duel | None:
    """None where there is one contender."""
    best = best_of(points)
    others = [point for point in points if point.contender != best.contender]
    if not others:
        return None
    next_best = best_of(others)
    same = [p for p in others if p.contender == next_best.contender and p.load == best.load]
    return Duel(best, next_best, same[0] if same else next_best)


def best_line(points: Sequence[Point], duels: Sequence[Duel]) -> str:
    if len(duels) > 1:
        return wins_line(duels)
    best = best_of(points)
    share = f"{number(100 * best.mean('slo_attainment_frac'))} % of requests within the SLO"
    line = f"{describe(best)}: {number(best.mean('goodput_rps'))} req/s ({share}{unserved(best)})"
    if not duels:
        return f"{line}."
    other = duels[0].next_best
    return f"{line}; next {describe(other)}: {number(other.mean('goodput_rps'))} req/s{unserved(other)}{interval(duels[0])}."


def unserved(point: Point) -> str:
    """A system that turns requests away is not compared without saying so."""
    if not point.mean("num_rejected"):
        return ""
    served = number(100 * point.mean("served_token_frac"))
    return f", {number(point.mean('num_rejected'))} rejected, {served} % of the tokens served"


def interval(duel: Duel) -> str:
    """The paired difference, where there are replicates."""
    difference, width = paired_difference(duel.best, duel.next_best, "goodput_rps")
    return f" (difference {number(difference)} ± {number(width)}, 95 %)" if isfinite(width) else ""


def wins_line(duels: Sequence[Duel]) -> str:
    """How often each contender is best, and the largest lead."""
    winners = [duel.best.contender for duel in duels]
    counts = sorted(((winners.count(name), name) for name in dict.fromkeys(winners)), key=lambda pair: -pair[0])
    wins = ", ".join(f"{name} in {count} of {len(duels)}" for count, name in counts)
    top = max(duels, key=lambda duel: duel.lead)
    order = f"{describe(top.best)} before {describe(top.next_best)}"
    return f"{wins}; largest lead × {top.lead:.2f} at {top.best.scenario} ({order})."


def describe(point: Point) -> str:
    return f"{point.contender}{f' at {point.at_load}' if point.at_load else ''}"


def why_line(points: Sequence[Point], duels: Sequence[Duel]) -> str:
    if not duels:
        return alone_line(best_of(points))
    duel = max(duels, key=lambda duel: duel.lead)
    a, b = duel.best, duel.same_load
    pairs = [(reason, a.mean(reason.metric), b.mean(reason.metric)) for reason in REASONS]
    told = sorted((p for p in pairs if contrast(p[1], p[2]) > 0.05), key=lambda p: -contrast(p[1], p[2]))[:NUM_REASONS]
    where = f"against {b.contender}{f' at {b.at_load}' if b.at_load else ''}"
    if not told:
        return f"{where}, nothing differs by more than 5 %."
    return f"{where}: {'; '.join(reason.text(x, y) for reason, x, y in told)}."


def contrast(a: float, b: float) -> float:
    """Relative difference, 0 (equal) to 1 (one of them is 0); below a thousandth both count as 0."""
    top = max(abs(a), abs(b))
    return abs(a - b) / top if isfinite(top) and top >= 1e-3 else 0.0


def alone_line(point: Point) -> str:
    parts = [(part.removesuffix("_s").replace("_", " "), point.mean(part)) for part in BREAKDOWN]
    told = [f"{name} {number(part_s)} s" for name, part_s in parts if part_s > 0]
    kv, compute = (number(100 * point.mean(f"{name}_util_frac")) for name in ("kv", "compute"))
    use = f"KV in use {kv} %, compute {compute} %"
    return f"a mean request takes {', '.join(told)}; {use}, mean batch {number(point.mean('batch_mean'))}."


def trust_line(points: Sequence[Point]) -> str:
    replicates = min(len(point.manifests) for point in points)
    seeds = "one seed, so small differences may be chance" if replicates == 1 else f"{replicates} seeds a point"
    devices = {
        manifest["hardware"]["device"] for point in points for manifest in point.manifests if "hardware" in manifest
    }
    if devices:
        return f"all times were measured ({', '.join(sorted(devices))}); {seeds}."
    each = [point.basis_shares() for point in points]
    told = ", ".join(f"{percent(mean([share[basis] for share in each]))} {basis}" for basis in BASES)
    packs = sorted({manifest["provenance"]["truth"]["pack"] for point in points for manifest in point.manifests})
    return f"simulated time is {told} (costs: {', '.join(packs)}); {seeds}."


def percent(share: float) -> str:
    """Whole percents; what is there and rounds to nothing is not nothing."""
    return f"{100 * share:.0f} %" if share == 0 or share >= 0.005 else "< 1 %"
