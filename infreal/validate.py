"""`infreal validate`: can the simulator's numbers be trusted on this machine? Profile it, run on it, simulate it, compare."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.compare import compare
from experiments.verdicts import Verdict, case_of, orders, remote_frac, verdicts
from infreal.cli import OneLineParser
from infreal.validation.cases import FULL, QUICK, SYSTEMS, Size
from infreal.validation.commands import Results, Steps, carry_out, num_steps
from infreal.validation.page import Findings, summary, write_page
from perfmodel.errors import InputError, RunError


def main(argv: Sequence[str] | None = None, prog: str = "infreal validate") -> int:
    """Exit code: 0 done, whatever the verdicts; 1 a step failed, 2 wrong input, 130 interrupted."""
    args = make_parser(prog).parse_args(argv)
    try:
        size = QUICK if args.quick else FULL
        validate(args.out, replace(size, repeats=args.repeats or size.repeats))
    except (InputError, RunError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=prog, description="Profile this machine, run on it, simulate it, and compare.")
    parser.add_argument("--out", type=Path, default=Path("out/validate"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one workload: tries the steps alone")
    parser.add_argument("--repeats", type=int, metavar="N", help=f"real runs of each case (default: {FULL.repeats})")
    return parser


def validate(folder: Path, size: Size) -> None:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()[0]
    console = Console(file=sys.stderr, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("validate", total=num_steps(size))
        steps = Steps(folder, lambda what: bar.update(task, advance=1, description=what))
        results, rates = carry_out(steps, size)
    found = [verdict for each in results for verdict in verdicts(each.simulated, each.reals)]
    ordered = orders(found, SYSTEMS)
    loads = (load_before, os.getloadavg()[0])
    remote = {case: share for each in results for case, share in remote_shares(each).items()}
    waited_frac = steps.waited_s / steps.real_s if steps.real_s else None
    findings = Findings(found, ordered, remote, rates, size.repeats, loads, waited_frac, steps.lines)
    page = write_page(folder, findings, results)
    tell(found)
    for order in ordered:
        print(order)
    print(f"{summary(found)} {page}")


def tell(found: Sequence[Verdict]) -> None:
    head = f"{'simulated':>10} {'real':>10} {'error':>8} {'allowed':>14} verdict"
    print(f"{'workload':<30} {'metric':<17} {head}")
    for verdict in found:
        print(verdict)


def remote_shares(results: Results) -> dict[str, float]:
    """By case, of the first real run; those that can borrow."""
    logs = compare(results.simulated, results.reals[0]).logs
    return {case_of(run): remote_frac(pair[0]) for run, pair in logs.items() if "infinite-llm" in run}


if __name__ == "__main__":
    sys.exit(main(prog="python -m infreal.validate"))
