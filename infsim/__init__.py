"""Serving LLMs with very uneven context lengths, in simulation.

    runs = infsim.run("demo", seed=1)            # a file, a ready configuration's name, or a mapping
    runs = infsim.load("out/demo")               # what `infsim run --out` wrote
    infsim.predict(model="llama2-7b", gpu="a100-80gb", decode=["64x1024"])

`Runs` holds DataFrames: summary, requests, instances, moves. Importing this module costs nothing; the work is imported on use.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.runs import Runs

__all__ = ["load", "predict", "run"]


def run(
    config: Path | str | Mapping[str, Any],
    out: Path | str | None = None,
    workers: int = 1,
    ray: str | None = None,
    **settings: Any,
) -> "Runs":
    """Carry a sweep out. `settings` change `base`: `seed=1`, or with `__` for the dot, `workload__rate_rps=4`.

    Runs go to `out` (None: a temporary folder, see `runs.folder`), `workers` of them at once, on the Ray cluster at address
    `ray` where that is given (all its nodes must see `out`). Raises InputError for wrong input, RunError where a
    run failed.
    """
    from infsim.api import run_config

    return run_config(config, out, (workers, ray), {key.replace("__", "."): value for key, value in settings.items()})


def load(folder: Path | str) -> "Runs":
    """The runs of a folder. Raises InputError where there are none."""
    from experiments.runs import load_runs

    return load_runs(folder)


def predict(**query: Any) -> dict[str, Any]:
    """Time of one iteration with its parts, as `infsim predict --json` prints it; keys are its options."""
    from infsim.api import predict_query

    return predict_query(**query)
