"""What a figure is made from: sizes, sweeps through the public API (kept, so that a second call costs nothing), cost models.

Owns where results lie (`OUT`/runs/NAME-HASH) and whether they are stale; knows no figure.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

import infsim
from experiments.catalogue import load_engine, load_gpu, load_link, load_model
from experiments.packs import cost_model
from experiments.runs import Runs
from perfmodel.cost import CostModel
from perfmodel.errors import InputError
from perfmodel.specs import InstanceSpec

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("perfmodel", "traces", "experiments", "infsim")  # what a simulated number depends on
GPU = "a100-80gb"
INTRA_LINK = "nvlink3"
LINKS = {"125 MB/s": "ethernet-1g", "100 Gb/s": "ethernet-100g"}  # between nodes: as the paper states it, and ours
ENGINES: dict[str, Any] = {
    "graphs": "graphs",
    "eager-2023": "eager-2023",
    "eager-2023, h1 = 0": {"preset": "eager-2023", "row_s": 0.0},
}
TENSOR_PARALLEL = {"llama2-7b": 1, "llama2-13b": 1, "llama2-70b": 4}  # [us] the least power of two that leaves KV room
SPLITS = ("chat", "balanced", "prompt-heavy")  # how a context divides into input and output: unknown, so all are shown
Size = TypeVar("Size")
SWEEP_FILE = "sweep.yaml"  # in a sweep's folder: what `infsim run` needs to make it again
SIZES = ("tiny", "reduced", "full")


@dataclass
class Study:
    """How much is simulated and where it goes. `size`: tiny (tests), reduced or full. `fresh`: simulate anew. `ray`: address of
    a Ray cluster that carries the runs out.

    `stale` collects sweeps that were kept although the project's sources have changed since.
    """

    out: Path = ROOT / "out" / "figures"
    size: str = "reduced"
    workers: int = 1
    fresh: bool = False
    ray: str | None = None
    stale: list[str] = field(default_factory=list)

    def pick(self, tiny: Size, reduced: Size, full: Size) -> Size:
        """A size of this study."""
        return dict(zip(SIZES, (tiny, reduced, full), strict=True))[self.size]

    def runs(self, name: str, config: Mapping[str, Any]) -> Runs:
        """The runs of a sweep, simulated where they are not there yet; the sweep's file lies beside them."""
        folder = self.out / "runs" / f"{name}-{digest(json.dumps(config, sort_keys=True).encode())[:8]}"
        if self.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        note = folder / "sources.txt"
        if note.is_file() and note.read_text(encoding="utf-8") != sources():
            self.stale.append(folder.name)
            print(f"{folder.name}: kept from other sources (FRESH=1 simulates anew)", file=sys.stderr)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            note.write_text(sources(), encoding="utf-8")
        (folder / SWEEP_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")  # JSON is YAML
        return infsim.run(config, out=folder, workers=self.workers, ray=self.ray)

    def workload(self, name: str, requests: Sequence[tuple[float, int, int]]) -> dict[str, str]:
        """The workload of a file with these requests: (arrival_s, input_tokens, output_tokens)."""
        path = self.out / "workloads" / f"{name}-{digest(repr(requests).encode())[:8]}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame(requests, columns=["arrival_s", "input_tokens", "output_tokens"])
        frame.assign(id=frame.index).to_csv(path, index=False)
        return {"trace": "own", "path": str(path)}

    def summary(self, name: str, config: Mapping[str, Any]) -> pd.DataFrame:
        """A row a run, as summary.csv has them; `run` is its folder, relative to `out`, `pool.*` what fits."""
        runs = self.runs(name, config)
        pools = pd.DataFrame([manifest["pool"] for manifest in runs.manifests]).add_prefix("pool.")
        frame = pd.concat([runs.summary, pools], axis=1)
        return frame.assign(run=[str(folder.relative_to(self.out)) for folder in runs.folders])


@cache
def sources() -> str:
    """sha256 over the files that simulated numbers depend on."""
    files = (path for name in PACKAGES for path in sorted((ROOT / name).rglob("*")))
    return digest(b"".join(path.read_bytes() for path in files if path.suffix in (".py", ".json", ".yaml")))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def instance_of(
    model: str, tensor_parallel: int = 1, engine: Any = "graphs", link: str = "ethernet-100g"
) -> InstanceSpec:
    """An instance of A100s with 8 GPUs a node."""
    links = load_link(INTRA_LINK), load_link(link)
    return InstanceSpec(load_model(model), load_gpu(GPU), load_engine(engine), *links, tensor_parallel)


def cost_of(model: str, tensor_parallel: int = 1, engine: Any = "graphs", link: str = "ethernet-100g") -> CostModel:
    """Its cost model, from the GPU's own profile pack."""
    return cost_model(instance_of(model, tensor_parallel, engine, link))


def peak_flops_per_s(instance: InstanceSpec) -> float:
    return instance.num_gpus * instance.gpu.flops_per_s(instance.model.dtype_bytes)


def layers_util(cost: CostModel, rows: int, time_s: Callable[[CostModel, int], float] | None = None) -> float:
    """Compute utilisation of the non-attention layers at a decode batch of `rows`: FLOPs / (time × peak)."""
    instance = cost.instance
    layers_s = (time_s or layers_time_s)(cost, rows)
    return rows * instance.model.matmul_flops_per_token / (layers_s * peak_flops_per_s(instance))


def layers_time_s(cost: CostModel, rows: int) -> float:
    """An iteration of `rows` rows without attention and LM head: kernels and collectives, launches, host."""
    kernels_s, collectives_s = cost.kernel_terms(rows)
    _, launch_s, host_s = cost.iteration_terms(rows, rows, rows)
    return max(kernels_s + collectives_s, launch_s) + host_s


def fixed(length: int, output: int, num_requests: int) -> dict[str, Any]:
    """A workload of equal requests of `length` tokens, input and output, all there at once."""
    params = {"input_tokens": length - output, "output_tokens": output}
    return {"generator": "fixed", "params": params, "num_requests": num_requests, "arrivals": "saturated"}


def decode_tok_per_s(requests: pd.DataFrame, start_s: float, end_s: float) -> float:
    """Output tokens/s in a window, from a run's requests: each emits its tokens evenly from its first to its last."""
    done = requests[(requests["status"] == "finished") & (requests["output_tokens"] > 1)]
    rate = (done["output_tokens"] - 1) / (done["finish_s"] - done["first_token_s"])
    seconds = (done["finish_s"].clip(upper=end_s) - done["first_token_s"].clip(lower=start_s)).clip(lower=0.0)
    return float((rate * seconds).sum() / (end_s - start_s))


def fullest_s(requests: pd.DataFrame) -> tuple[float, float]:
    """(start, end) of the time in which most requests decode at once."""
    done = requests[requests["status"] == "finished"]
    steps = [(t, 1) for t in done["first_token_s"]] + [(t, -1) for t in done["finish_s"]]
    best, count, span = 0, 0, (0.0, 0.0)
    ordered = sorted(steps)
    for (t_s, change), (until_s, _) in pairwise(ordered):
        count += change
        if count > best and until_s > t_s:
            best, span = count, (t_s, until_s)
    return span


class NoData(InputError):
    """A figure's data is not here; the text says what makes it."""
