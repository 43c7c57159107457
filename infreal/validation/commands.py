"""The steps of a validation, each a command of its own process: what is there already is not done again."""

import csv
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.importers import infreal as read_profile
from experiments.machine import link_entry
from experiments.runs import load_runs
from infreal.validation.cases import LOADS, NO_WAIT, SYSTEMS, Size, write_model, write_sweep, write_trace
from perfmodel.errors import RunError

SATURATED, PACED = "saturated", "paced"


@dataclass
class Steps:
    """Runs commands in `folder` and keeps what was run. tell(what): called before each · real_s: of the real runs done now, and in
    how much of it something on this machine waited for a core."""

    folder: Path
    tell: Callable[[str], None] = lambda what: None
    lines: list[str] = field(default_factory=list)
    real_s: float = 0.0
    waited_s: float = 0.0

    def run(self, what: str, done: bool, module: str, *arguments: object) -> None:
        """Raises RunError, with the last line of the command, where it fails."""
        self.tell(what)
        command = [module, *(str(a) for a in arguments)]
        self.lines.append(shlex.join(command))
        if done:
            return
        began_s, waits_s = time.monotonic(), core_waits_s()
        with (self.folder / "commands.log").open("a", encoding="utf-8") as log:
            print(f"$ {self.lines[-1]}", file=log, flush=True)
            start = log.tell()
            answer = subprocess.run(
                [sys.executable, "-m", *command], cwd=self.folder, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        if module == "infreal" and arguments[0] == "run":
            self.real_s += time.monotonic() - began_s
            self.waited_s += core_waits_s() - waits_s
        if answer.returncode:
            said = (self.folder / "commands.log").read_bytes()[start:].decode(errors="replace").strip().splitlines()
            raise RunError(f"{self.lines[-1]}: exit {answer.returncode}: {said[-1] if said else 'no output'}")


def core_waits_s() -> float:
    """How long something on this machine has waited for a core since it started; 0 where the kernel does not say."""
    pressure = Path("/proc/pressure/cpu")
    try:
        return float(pressure.read_text(encoding="utf-8").split("total=")[1].split()[0]) / 1e6
    except (OSError, IndexError):
        return 0.0


@dataclass(frozen=True, slots=True)
class Results:
    """Folders of one sweep: simulated, and each real repetition."""

    simulated: Path
    reals: tuple[Path, ...]
    compared: Path


def num_steps(size: Size) -> int:
    return 2 + 2 * (size.repeats + 2)


def carry_out(steps: Steps, size: Size) -> tuple[list[Results], dict[str, float]]:
    """All steps. Returns the two sweeps and the capacity of each workload in requests/s."""
    link = profile(steps, size)
    traces = [write_trace(steps.folder, size, workload, NO_WAIT, None) for workload in size.workloads]
    saturated = both_worlds(steps, size, SATURATED, link, traces)
    rates = capacities(saturated.reals[0], size)
    write_capacities(steps.folder / "capacity.csv", rates)
    traces = [
        write_trace(steps.folder, size, workload, load, load * rates[workload])
        for workload in size.workloads
        for load in size.loads
    ]
    return [saturated, both_worlds(steps, size, PACED, link, traces)], rates


def profile(steps: Steps, size: Size) -> dict[str, Any]:
    """profile.csv and pack.json. Returns the link as it was measured."""
    folder = steps.folder
    write_model(folder, size)
    options = ("--model", "model/config.json", "--device", "cpu", "--out", "profile.csv", *size.profile)
    pack = (folder / "pack.json").exists()
    steps.run("profile", pack, "infreal", "profile", *options)
    steps.run("calibrate", pack, "infsim", "calibrate", "--from", "infreal=profile.csv", "--out", "pack.json")
    return {"preset": "loopback", **link_entry(read_profile(folder / "profile.csv"))}


def both_worlds(steps: Steps, size: Size, name: str, link: dict[str, Any], traces: Sequence[str]) -> Results:
    folder, runs = steps.folder, len(traces) * len(SYSTEMS)
    config = write_sweep(folder, name, size, link, list(traces)).name
    reals = [f"{name}-real-{i + 1}" for i in range(size.repeats)]
    for real in reals:
        options = ("--ray", "local", "--pinned", "--events", "--out", real)
        steps.run(f"{name}, {real}", is_complete(folder / real, runs), "infreal", "run", config, *options)
    simulated, compared = f"{name}-simulated", f"{name}-compared"
    steps.run(
        f"{name}, simulated",
        is_complete(folder / simulated, runs),
        *("infsim", "run", config, "--events", "--out", simulated),
    )
    steps.run(f"{name}, compared", False, "infsim", "compare", simulated, *reals, "--out", compared)
    return Results(folder / simulated, tuple(folder / real for real in reals), folder / compared)


def is_complete(folder: Path, runs: int) -> bool:
    """All runs are done. Where not, the command itself resumes."""
    manifests = load_runs(folder).manifests if (folder / "runs").is_dir() else []
    return len(manifests) == runs and all(manifest["status"] == "done" for manifest in manifests)


def capacities(saturated: Path, size: Size) -> dict[str, float]:
    """Requests/s that the slower of the systems ends, with all requests there from the start."""
    summary = pd.read_csv(saturated / "summary.csv")
    rates = summary["num_requests"] / summary["makespan_s"]
    by_trace = rates.groupby(summary["workload.path"]).min()
    return {workload: float(by_trace[f"{workload}@{NO_WAIT}.csv"]) for workload in size.workloads}


def write_capacities(path: Path, rates: dict[str, float]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("workload", "requests_per_s", *(f"at_{load}" for load in LOADS)))
        writer.writerows((name, rate, *(load * rate for load in LOADS)) for name, rate in rates.items())
