"""`infreal run`: the sweep of a configuration on hardware: several instances in one process, or as actors of a Ray cluster.

The same folder as `infsim run` writes.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments import raycluster
from experiments.config import Config
from experiments.plan import RunPlan, plan_cluster, plan_instance
from experiments.run_command import Request, list_runs, run_command
from experiments.sweep import HARDWARE, Recording, Workers
from experiments.watching import watching
from infreal.cli import OneLineParser
from infreal.clocks import WallClock
from infreal.driver import InProcess, Options
from infreal.generate import default_backend, default_device, model_input
from infreal.sources import ModelSource, check_pools, find_model, load_model, make_requests
from perfmodel.errors import InputError, RunError
from perfmodel.records import RunResult


def main(argv: Sequence[str], prog: str = "infreal run") -> int:
    """Exit code: 0 done, 1 a run failed, 2 wrong input, 130 interrupted."""
    args = make_parser(prog).parse_args(argv)
    request = Request(args.config, args.out, tuple(args.set), args.seed)
    try:
        for run in request.sweep().runs:
            check_config(run.config, on_actors=args.ray is not None)
        if args.dry_run:
            return list_runs(request)
        recording, workers = Recording(args.events, args.timeline, args.strict), Workers(args.workers)
        check_transport(args)
        if args.ray is None:
            if args.pinned:
                raise InputError("--pinned: instances of one process share its cores (allowed: with --ray)")
            return run_command(request, partial(run_one, no_wait=args.no_wait), recording, workers, HARDWARE)
        check_ray(args)
        with raycluster.connected(args.ray):
            run = partial(run_one_on_ray, ray=args.ray, carrier=args.transport, pinned=args.pinned)
            return run_command(request, run, recording, workers, HARDWARE)
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
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="every rank of an instance an actor of a Ray cluster: its address, or local for one of this machine",
    )
    parser.add_argument(
        "--pinned", action="store_true", help="with --ray: a rank of an instance a core of its own, by number"
    )
    parser.add_argument(
        "--transport",
        choices=["gloo", "nccl"],
        default="gloo",
        help="with --ray: what carries tensors between GPUs (default: gloo; nccl: not tested on hardware)",
    )
    parser.add_argument("--strict", action="store_true", help="as in infsim run; measured times always pass")
    parser.add_argument("--events", action="store_true", help="write events.jsonl (infsim replay)")
    parser.add_argument("--timeline", action="store_true", help="write timeline.json (Perfetto)")
    parser.add_argument("--dry-run", action="store_true", help="check the input and list the runs")
    parser.add_argument("--no-wait", action="store_true", help="skip the time in which there is nothing to do")
    return parser


def check_ray(args: argparse.Namespace) -> None:
    """Raises InputError for what actors cannot do."""
    if args.no_wait:
        raise InputError("--no-wait: time is real on actors (allowed: without --ray)")
    if args.workers != 1:
        raise InputError(f"--workers: {args.workers} (allowed with --ray: 1, a run has the cluster for itself)")


def check_transport(args: argparse.Namespace) -> None:
    """Raises InputError where there is nothing for NCCL to carry."""
    if args.transport == "nccl" and (args.ray is None or not default_device().startswith("cuda")):
        raise InputError("--transport: nccl (allowed without --ray, or without CUDA: gloo)")


def check_config(config: Config, on_actors: bool = False) -> None:
    """Raises InputError for what only a simulation can do, or only actors."""
    instance, _ = plan_instance(config)
    if instance.pipeline_parallel > 1:
        raise InputError(f"instance.pipeline_parallel: {instance.pipeline_parallel} (allowed on hardware: 1)")
    if instance.tensor_parallel > 1 and not on_actors:
        raise InputError(
            f"instance.tensor_parallel: {instance.tensor_parallel} (allowed in one process: 1; with --ray each rank is an actor)"
        )
    if config.chaos is not None:
        raise InputError("chaos: faults are injected in simulation (allowed on hardware: null)")
    if config.kv_dtype not in (None, config.dtype):
        raise InputError(f"kv_dtype: {config.kv_dtype} (allowed on hardware: the model's own dtype)")


def run_one(plan: RunPlan, folder: Path, recording: Recording, no_wait: bool = False) -> RunResult:
    """Carry a plan out on this machine. no_wait: time in which there is nothing to do is skipped."""
    device, config = default_device(), plan.config
    with model_input():
        source = find_model(config.model, config.real.weights, config.dtype)
        decoder = load_model(config.model, config.real.weights, config.dtype, device)
        check_pools(plan.spec, source, device)
    plan.facts["hardware"] = hardware(source, device, torch.get_num_threads())
    requests = make_requests(config, plan.workload, source)
    with watching(plan, folder, recording) as observer:
        options = Options(default_backend(device))
        return InProcess(plan.spec, requests, decoder, WallClock(no_wait), observer, options).run()


def run_one_on_ray(
    plan: RunPlan, folder: Path, recording: Recording, ray: str, carrier: str = "gloo", pinned: bool = False
) -> RunResult:
    """Carry a plan out on the Ray cluster that this process is connected to, every instance an actor."""
    from infreal.actors.run import RayOptions, make_head

    device, config = default_device(), plan.config
    with model_input():
        source = find_model(config.model, config.real.weights, config.dtype)
        if ray == raycluster.LOCAL:
            check_pools(plan.spec, source, device)
    plan.facts["hardware"] = hardware(source, device, 1) | {"ray": ray}
    requests = make_requests(config, plan.workload, source)
    make_decoder = partial(load_model, config.model, config.real.weights, config.dtype, device)
    options = RayOptions(ray, device, default_backend(device), carrier, pinned=pinned)
    with watching(plan, folder, recording) as observer:
        return make_head(partial(plan_cluster, config), make_decoder, requests, observer, options).run()


def hardware(source: ModelSource, device: str, num_threads: int) -> dict[str, Any]:
    """What a manifest says of where a run was carried out."""
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu, {num_threads} threads",
        "dtype": str(source.dtype).removeprefix("torch."),
        "weights": source.where,
        "num_threads": num_threads,
        "torch": torch.__version__,
    }
