"""`infreal run`: the sweep of a configuration on this machine, several instances in one process. Same folder as `infsim run`."""

import argparse
import sys
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch

from experiments.catalogue import load_model_config
from experiments.config import Config
from experiments.plan import RunPlan
from experiments.run_command import Request, list_runs, run_command
from experiments.sweep import HARDWARE, Recording, Workers
from experiments.watching import watching
from infreal.cli import OneLineParser
from infreal.clocks import WallClock
from infreal.driver import InProcess, Options
from infreal.generate import default_backend, default_device, model_input
from infreal.model import Decoder, config_from_hf, load_decoder, open_checkpoint, random_decoder
from infreal.model.config import DTYPES
from infreal.model.weights import check_memory
from infreal.requests import RandomPrompts, Requests
from perfmodel.errors import InputError, RunError
from perfmodel.records import RunResult

WEIGHTS_SEED = 0  # of a model without weights: the runs of a sweep share them
DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def main(argv: Sequence[str], prog: str = "infreal run") -> int:
    """Exit code: 0 done, 1 a run failed, 2 wrong input, 130 interrupted."""
    args = make_parser(prog).parse_args(argv)
    request = Request(args.config, args.out, tuple(args.set), args.seed)
    try:
        for run in request.sweep().runs:
            check_config(run.config)
        if args.dry_run:
            return list_runs(request)
        recording = Recording(args.events, args.timeline, args.strict)
        return run_command(request, partial(run_one, no_wait=args.no_wait), recording, Workers(args.workers), HARDWARE)
    except (InputError, RunError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; the same command resumes", file=sys.stderr)
        return 130


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=prog, description="Sweep serving policies over a workload on this machine.")
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a ready one")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (default: out/NAME)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of base; repeatable"
    )
    parser.add_argument("--seed", type=int, help="same as --set seed=N")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="runs at once (default: 1, they share the machine)"
    )
    parser.add_argument("--strict", action="store_true", help="as in infsim run; measured times always pass")
    parser.add_argument("--events", action="store_true", help="write events.jsonl (infsim replay)")
    parser.add_argument("--timeline", action="store_true", help="write timeline.json (Perfetto)")
    parser.add_argument("--dry-run", action="store_true", help="check the input and list the runs")
    parser.add_argument("--no-wait", action="store_true", help="skip the time in which there is nothing to do")
    return parser


def check_config(config: Config) -> None:
    """Raises InputError for what only a simulation can do."""
    sizes, num_gpus = config.instance, config.cluster.num_gpus
    if config.layout == "single" and num_gpus > 1:
        raise InputError(
            f"layout single: one instance of {num_gpus} GPUs (allowed on hardware: multi, a GPU an instance)"
        )
    for name in ("tensor_parallel", "pipeline_parallel"):
        if getattr(sizes, name) > 1:
            raise InputError(f"instance.{name}: {getattr(sizes, name)} (allowed on hardware: 1)")
    if config.chaos is not None:
        raise InputError("chaos: faults are injected in simulation (allowed on hardware: null)")
    if config.kv_dtype not in (None, config.dtype):
        raise InputError(f"kv_dtype: {config.kv_dtype} (allowed on hardware: the model's own dtype)")


def run_one(plan: RunPlan, folder: Path, recording: Recording, no_wait: bool = False) -> RunResult:
    """Carry a plan out on this machine. no_wait: time in which there is nothing to do is skipped."""
    device = default_device()
    with model_input():
        config = plan.config
        decoder, weights = load_model(config.model, config.real.weights, config.dtype, device)
        check_pools(plan, decoder)
    plan.facts["hardware"] = {
        "device": device_name(device),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "weights": weights,
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    prompts = RandomPrompts(plan.workload, decoder.config.vocab_size, config.seed)
    requests = Requests(plan.workload, prompts, stop_ids(config, decoder))
    with watching(plan, folder, recording) as observer:
        options = Options(default_backend(device))
        return InProcess(plan.spec, requests, decoder, WallClock(no_wait), observer, options).run()


def stop_ids(config: Config, decoder: Decoder) -> tuple[int, ...]:
    """Tokens that end an output early: none where lengths are those of the workload."""
    if not config.real.stop_at_eos:
        return ()
    if not decoder.config.eos_token_ids:
        raise InputError(f"real.stop_at_eos: model {config.model} names no end token (allowed: false)")
    return decoder.config.eos_token_ids


@lru_cache(maxsize=1)
def load_model(model: str, weights: str | None, dtype: str | None, device: str) -> tuple[Decoder, str]:
    """A decoder, shared by the runs of a sweep, and where its weights come from. Raises ModelError, InputError.

    model, dtype: as in a configuration; weights: its `real.weights`.
    """
    fields, _, where = load_model_config(model)
    config = config_from_hf(fields, where)
    folder = Path(where).parent
    if weights is None and Path(where).is_file() and any(folder.glob("*.safetensors")):
        weights = str(folder)
    target = DTYPES[DTYPE_NAMES.get(dtype, dtype)] if dtype else config.dtype
    if weights is None:
        return random_decoder(config, WEIGHTS_SEED, target, device), "random"
    checkpoint = open_checkpoint(weights)
    for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        found, wanted = getattr(checkpoint.config, name), getattr(config, name)
        if found != wanted:
            raise InputError(f"real.weights: {weights} has {name} {found}, model {model} has {wanted}")
    return load_decoder(checkpoint, target, device), weights


def check_pools(plan: RunPlan, decoder: Decoder) -> None:
    """Raises ModelError where the pools of all instances are more than the machine has."""
    spec = plan.spec
    num_bytes = (
        spec.num_instances * spec.num_blocks * decoder.config.block_bytes(spec.instance.block_tokens, decoder.dtype)
    )
    what = f"{spec.num_instances} KV pools of {spec.num_blocks:,} blocks (instance.blocks_per_gpu sets a number)"
    check_memory(what, num_bytes, decoder.device)


def device_name(device: str) -> str:
    return (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu, {torch.get_num_threads()} threads"
    )
