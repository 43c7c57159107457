"""Behind `infsim.run` and `infsim.predict`: the same sweep and the same prediction as the commands, without a terminal."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.predict import Query
from experiments.predict import predict as predict_batch
from experiments.runs import Runs
from experiments.sweep import Loop, Workers, run_sweep
from experiments.sweepfile import load_sweep
from infsim.runner import run_one
from perfmodel.errors import RunError

OPTIONS = {"tp": "tensor_parallel", "pp": "pipeline_parallel"}  # the command's short names


def run_config(
    config: Path | str | Mapping[str, Any],
    out: Path | str | None,
    workers: tuple[int, str | None],
    settings: Mapping[str, Any],
) -> Runs:
    """See `infsim.run`; `workers`: how many at once, and the Ray cluster's address."""
    sweep = load_sweep(config, settings)
    folder = Path(out) if out is not None else Path(tempfile.mkdtemp(prefix=f"infsim-{sweep.name}-"))
    runs = run_sweep(sweep, folder, Loop(run_one, workers=Workers(*workers)))
    check_done(runs)
    return runs


def check_done(runs: Runs) -> None:
    """Raises RunError naming the first run that failed."""
    failed = [
        (folder, m["error"]) for folder, m in zip(runs.folders, runs.manifests, strict=True) if m["status"] == "failed"
    ]
    if failed:
        folder, error = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise RunError(f"{folder}: {error}{more}")


def predict_query(memory: bool = False, max_context: bool = False, **query: Any) -> dict[str, Any]:
    """See `infsim.predict`."""
    return predict_batch(Query(**{OPTIONS.get(key, key): value for key, value in query.items()}), memory, max_context)
