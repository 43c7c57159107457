"""`infreal profile`: measures this machine and one model on it; `infsim calibrate --from infreal=CSV` makes a pack of it."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.catalogue import gpu_of_device
from infreal.bench.profile import ProfileRow, device_name, software
from infreal.cli import OneLineParser
from infreal.generate import default_backend, default_device
from infreal.model import ModelError
from infreal.profiling.actors import measure_actors
from infreal.profiling.check import check_pack
from infreal.profiling.model import (
    CHUNKS,
    DECODE_ROWS,
    HEAD_ROWS,
    HOST_ROWS,
    MOST_LAYER_POINTS,
    PREFIXES,
    SERVED,
    SHORTEST_TOKENS,
    Subject,
    measure_model,
)
from infreal.profiling.pair import MOVE_BYTES, PING_BYTES, measure_pair
from infreal.profiling.table import MismatchError, Table
from infreal.sources import load_model
from perfmodel.errors import InputError

ABOUT_POINTS = MOST_LAYER_POINTS + len(HEAD_ROWS) + len(HOST_ROWS) + 4 * len(DECODE_ROWS) + len(CHUNKS) * len(PREFIXES)
ABOUT_POINTS += 3 * len(SERVED) + 4 + len(PING_BYTES) + 2 * len(MOVE_BYTES)

LEAST_POOL_TOKENS = DECODE_ROWS[-1] * SHORTEST_TOKENS


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=prog, description="Measure what the cost model needs to know of this machine.")
    parser.add_argument("--model", default="smollm2-135m", help="as in a configuration (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="as in a configuration (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (default: 1, a core as one GPU)")
    parser.add_argument("--pool-tokens", type=int, default=16384, help="KV tokens that fit (default: %(default)s)")
    pair = parser.add_mutually_exclusive_group()
    pair.add_argument("--no-pair", action="store_true", help="leave out what takes a second process")
    pair.add_argument("--only-pair", action="store_true", help="leave out what takes one")
    pair.add_argument("--core", type=int, metavar="N", help="pinned to one core, by its number; without the pair")
    parser.add_argument(
        "--check", type=Path, metavar="PACK", help="measure nothing but batches that no profile holds, beside PACK"
    )
    parser.add_argument("--out", type=Path, default=Path("profile.csv"), metavar="CSV", help="default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "infreal profile") -> int:
    import torch

    parser = make_parser(prog)
    args = parser.parse_args(argv)
    if args.threads < 1 or args.pool_tokens < LEAST_POOL_TOKENS:
        parser.error(
            f"--threads {args.threads}, --pool-tokens {args.pool_tokens} (allowed: 1 or more, {LEAST_POOL_TOKENS} or more)"
        )
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: {args.out.parent} is no folder")
    device = args.device or default_device()
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    threads, cores = torch.get_num_threads(), sorted(os.sched_getaffinity(0))
    if args.core is not None and not 0 <= args.core < len(cores):
        parser.error(f"--core {args.core} (allowed: 0 to {len(cores) - 1})")
    torch.set_num_threads(args.threads)
    try:
        if args.core is not None:
            os.sched_setaffinity(0, {cores[args.core]})
        check(args, device) if args.check else measure(args, device)
    except (MismatchError, ModelError, InputError) as error:
        parser.error(str(error))
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)
    return 0


def measure(args: argparse.Namespace, device: str) -> None:
    decoder, backend = load_model(args.model, None, args.dtype, device), default_backend(device)
    config, started_s = decoder.config, time.monotonic()
    shape = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    names = device_name(device), software(backend), str(decoder.dtype).removeprefix("torch.")
    common = ProfileRow("", *names, tensor_parallel=1, n=config.num_layers, k=config.hidden_size, **shape)
    console = Console(file=sys.stderr, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("profile", total=ABOUT_POINTS)

        def tell(row: ProfileRow) -> None:
            bar.update(task, advance=1, description=row.operator)

        table = Table(args.out, common, tell)
        bar.update(task, completed=len(table.rows))
        if not args.only_pair:
            measure_model(table, Subject(decoder, backend, args.pool_tokens))
        if not args.no_pair and args.core is None:
            measure_pair(table)
            if device == "cpu" and len(os.sched_getaffinity(0)) > 1:
                measure_actors(table, args.model, args.dtype)
    print(f"{args.out}: {len(table.rows)} points of {args.model} on {names[0]}, {time.monotonic() - started_s:.0f} s")


def check(args: argparse.Namespace, device: str) -> None:
    decoder = load_model(args.model, None, args.dtype, device)
    gpu = gpu_of_device(device_name(device)) or "cpu"
    print(f"{'batch':<48} {'measured':>11} {'priced':>11} {'error':>7}")
    subject = Subject(decoder, default_backend(device), args.pool_tokens)
    for checked in check_pack(subject, args.model, args.dtype, gpu, args.check):
        print(checked, flush=True)
