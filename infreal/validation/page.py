"""The page of a validation: verdicts, order of the systems, decisions, machine, versions and commands."""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from matplotlib.figure import Figure

from experiments.compare import compare
from experiments.decisions import decisions_of, equal_shares, first_divergence
from experiments.plotstyle import BLUE, GREY, RED, new_figure, save, styled
from experiments.verdicts import Order, Verdict, case_of
from infreal.bench.profile import device_name
from infreal.validation.commands import Results

PACKAGES = ("infsim", "torch", "ray", "numpy")
HEAD = ("workload", "metric", "simulated", "real", "error", "allowed", "verdict")


@dataclass(frozen=True, slots=True)
class Findings:
    """What a page tells. remote: share of KV tokens read elsewhere, by case · capacities: requests/s by workload · loads: load
    average of the machine before and after · waited_frac: of the real runs' time, that in which something waited for a core."""

    verdicts: Sequence[Verdict]
    orders: Sequence[Order]
    remote: dict[str, float]
    capacities: dict[str, float]
    repeats: int
    loads: tuple[float, float]
    waited_frac: float | None
    commands: Sequence[str]


def write_page(folder: Path, findings: Findings, results: Sequence[Results]) -> Path:
    save(residuals(findings.verdicts), folder / "validate")
    path = folder / "validate.md"
    path.write_text("\n".join(lines_of(findings, results, folder)) + "\n", encoding="utf-8")
    return path


def lines_of(findings: Findings, results: Sequence[Results], folder: Path) -> Iterator[str]:
    found = findings.verdicts
    yield from ("# Simulated and real", "", summary(found), "", "![Residuals](validate.png)", "")
    yield from (row(HEAD), row(["---"] * len(HEAD)), *(row(cells(verdict)) for verdict in found), "")
    yield "Each workload is named with its load: a share of the measured capacity, or `no-wait`, all requests at once."
    yield f"Errors are (simulated − real) / real, of the mean of {findings.repeats} real runs; `e2e_s_mape` is the mean |error|"
    yield "of a request's latency. Allowed is the limit, or twice the noise of the real runs where that is more, and at most 20 %."
    yield from ("", "## Which system is better", "")
    yield "Where the real systems differ by more than their noise:"
    yield from ("", *(f"- {order}" for order in findings.orders or ["nowhere"]), "")
    yield from ("## KV tokens read on other instances", "")
    yield from (f"- {case}: {share:.0%}" for case, share in findings.remote.items())
    yield from (
        "",
        "Measured capacity: " + ", ".join(f"{k} {v:.3g} requests/s" for k, v in findings.capacities.items()),
        "",
    )
    yield from ("## Decisions", "")
    for each in results:
        yield from decision_lines(each)
    yield from ("", *(f"![{r.compared.name}]({r.compared.relative_to(folder)}/compare.png)" for r in results), "")
    yield from ("## Where and how", "", *machine_lines(findings), "", "```", *findings.commands, "```")


def summary(found: Sequence[Verdict]) -> str:
    return f"{sum(verdict.holds for verdict in found)} of {len(found)} metrics are within what is allowed."


def row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def cells(v: Verdict) -> list[str]:
    return [v.run, v.metric, f"{v.simulated:.4g}", f"{v.real:.4g}", f"{v.error_frac:+.1%}", v.rule, v.word]


def decision_lines(results: Results) -> Iterator[str]:
    """Of each run with event logs in both worlds: equal shares by kind, and the first difference."""
    for run, logs in compare(results.simulated, results.reals[0]).logs.items():
        a, b = (decisions_of(log) for log in logs)
        shares = ", ".join(f"{kind} {share:.0%} of {most}" for kind, (share, most, _) in equal_shares(a, b).items())
        place = first_divergence(a, b)
        first = f"; first difference at {place.t_s:.2f} s, {place.machine}" if place else "; the same in all"
        yield f"- {case_of(run)}: equal {shares}{first}"


def machine_lines(findings: Findings) -> Iterator[str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield f"- {device_name('cpu').partition(',')[0]}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"
    yield f"- Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    yield f"- {torch.get_num_threads()} threads in this process, one in each instance, which has a core of its own"
    before, after = findings.loads
    yield f"- load average {before:.1f} before and {after:.1f} after"
    if findings.waited_frac is not None:
        yield f"- in {findings.waited_frac:.0%} of the real runs' time something waited for a core"


@styled
def residuals(found: Sequence[Verdict]) -> Figure:
    """A dot a metric over the band that is allowed, a panel a metric."""
    metrics = list(dict.fromkeys(verdict.metric for verdict in found))
    cases = list(dict.fromkeys(verdict.run for verdict in found))
    figure, [panels] = new_figure(1, len(metrics), width=2.6, height=1.0 + 0.22 * len(cases))
    for number, (metric, axes) in enumerate(zip(metrics, panels, strict=True)):
        for verdict in (v for v in found if v.metric == metric):
            at, allowed = cases.index(verdict.run), 100 * verdict.allowed_frac
            axes.barh(at, 2 * allowed, left=-allowed, color=GREY, alpha=0.2)
            axes.plot(100 * verdict.error_frac, at, "o", color=BLUE if verdict.holds else RED)
        axes.axvline(0, color=GREY, lw=0.8)
        axes.set_yticks(range(len(cases)), cases if number == 0 else [""] * len(cases))
        axes.set(title=metric, xlabel="error, %", ylim=(len(cases) - 0.5, -0.5))
    return figure
