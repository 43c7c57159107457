"""The steps of a validation, each a command of its own process: what is there already is not done again."""

import csv
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pandas as pd

from experiments.importers import infreal as read_profile
from experiments.machine import link_entry
from experiments.runs import load_runs
from infreal.validation.cases import BELIEF, LOADS, NO_WAIT, Size, write_model, write_sweep, write_trace
from perfmodel.errors import RunError

SATURATED, PACED = "saturated", "paced"
PROFILES, PACK = "profiles", "pack.json"
NUM_CORES = 2  # an instance each


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
        started = [sys.executable, "-m", *command]
        answer = subprocess.run(
            started, cwd=self.folder, stdout=PIPE, stderr=STDOUT, text=True, errors="replace", check=False
        )
        with (self.folder / "commands.log").open("a", encoding="utf-8") as log:
            print(f"$ {shlex.join(command)}", answer.stdout, sep="\n", end="", file=log)
        if module == "infreal" and arguments[0] == "run":
            self.real_s += time.monotonic() - began_s
            self.waited_s += core_waits_s() - waits_s
        if answer.returncode:
            said = answer.stdout.strip().splitlines()
            raise RunError(f"{shlex.join(command)}: exit {answer.returncode}: {said[-1] if said else 'no output'}")


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
    return size.repeats * (NUM_CORES + 2) + 7


def carry_out(steps: Steps, size: Size) -> tuple[list[Results], dict[str, float]]:
    """All steps. Returns the two sweeps and the capacity of each workload in requests/s.

    The machine is profiled before every repetition, so that profile and runs have met the same machine: one that others use as
    well, as virtual ones do, is not equally fast all the time.
    """
    write_model(steps.folder, size)
    for number in range(1, size.repeats + 1):
        profile(steps, size, number)
        if number == 1:
            link = learn(steps)
            write_sweep(steps.folder, SATURATED, size, link, traces_at(steps.folder, size, NO_WAIT))
        run_real(steps, SATURATED, number)
        if number == 1:
            rates = capacities(steps.folder / f"{SATURATED}-real-1", size)
            write_capacities(steps.folder / "capacity.csv", rates)
            paced = [trace for load in size.loads for trace in traces_at(steps.folder, size, load, rates)]
            write_sweep(steps.folder, PACED, size, link, paced)
        run_real(steps, PACED, number)
    steps.run("calibrate", False, "infsim", "calibrate", "--from", f"infreal={PROFILES}", "--out", PACK)
    return [simulate(steps, name, size.repeats) for name in (SATURATED, PACED)], rates


def traces_at(folder: Path, size: Size, load: float | str, rates: dict[str, float] | None = None) -> list[str]:
    """Of all workloads, at a load that is a share of `rates`, or all requests at once."""
    return [write_trace(folder, size, name, load, load * rates[name] if rates else None) for name in size.workloads]


def profile(steps: Steps, size: Size, number: int) -> None:
    """Both cores at once, as instances are at work on them; in the first profile also what takes two processes."""
    (steps.folder / PROFILES).mkdir(exist_ok=True)
    about = ("--model", "model/config.json", "--device", "cpu", *size.profile)
    done = (steps.folder / f"{SATURATED}-real-{number}").exists()

    def measure(out: str, *options: object) -> None:
        steps.run(f"profile {number}", done, "infreal", "profile", *about, *options, "--out", f"{PROFILES}/{out}.csv")

    with ThreadPoolExecutor() as threads:
        cores = [threads.submit(measure, f"{number}-core-{core}", "--core", core) for core in range(NUM_CORES)]
    for core in cores:
        core.result()
    if number == 1:
        measure("pair", "--only-pair")


def learn(steps: Steps) -> dict[str, Any]:
    """What policies believe in all runs, of the first profile. Returns the link as it was measured."""
    belief = steps.folder / BELIEF
    steps.run("belief", belief.exists(), "infsim", "calibrate", "--from", f"infreal={PROFILES}", "--out", belief.name)
    return {"preset": "loopback", **link_entry(read_profile(steps.folder / PROFILES))}


def run_real(steps: Steps, name: str, number: int) -> None:
    folder = f"{name}-real-{number}"
    options = ("--ray", "local", "--pinned", "--events", "--out", folder)
    steps.run(folder, is_complete(steps.folder, name, folder), "infreal", "run", f"{name}.yaml", *options)


def simulate(steps: Steps, name: str, repeats: int) -> Results:
    """The truth is what all profiles say."""
    simulated, compared = f"{name}-simulated", f"{name}-compared"
    options = ("--set", f"truth.pack=./{PACK}", "--events")
    shutil.rmtree(steps.folder / simulated, ignore_errors=True)  # there may be more profiles than before
    steps.run(simulated, False, "infsim", "run", f"{name}.yaml", *options, "--out", simulated)
    reals = [f"{name}-real-{number}" for number in range(1, repeats + 1)]
    steps.run(compared, False, "infsim", "compare", simulated, *reals, "--out", compared)
    return Results(*(steps.folder / simulated, tuple(steps.folder / real for real in reals), steps.folder / compared))


def is_complete(folder: Path, sweep: str, out: str) -> bool:
    """All runs are done. Where not, the command itself resumes."""
    axes = json.loads((folder / f"{sweep}.yaml").read_text())["axes"]
    manifests = load_runs(folder / out).manifests if (folder / out / "runs").is_dir() else []
    return len(manifests) == prod(map(len, axes.values())) and all(
        manifest["status"] == "done" for manifest in manifests
    )


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
