"""`python -m infreal.bench attention [--device cpu|cuda] [--out DIR]`: measures, prints a table, writes a profile CSV."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from infreal.cli import OneLineParser


def make_parser(prog: str = "python -m infreal.bench") -> argparse.ArgumentParser:
    parser = OneLineParser(prog=prog, description="Benchmarks of the real backend.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    attention = commands.add_parser("attention", help="decode MicroAttention, its merge and its rivals")
    attention.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    attention.add_argument("--backend", choices=("torch", "triton"), help="default: triton on cuda, torch on cpu")
    attention.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="default: float16 on cuda, float32 on cpu"
    )
    attention.add_argument("--threads", type=int, help="threads of torch on the CPU (default: as torch has it)")
    attention.add_argument(
        "--seconds", type=float, default=280.0, help="no new case is begun after this (default: 280)"
    )
    attention.add_argument(
        "--kv-gib", type=float, help="largest KV of a case in GiB (default: 1.5 on cpu, 2/5 of the memory on cuda)"
    )
    attention.add_argument("--models", nargs="+", help="only these models (default: all)")
    attention.add_argument("--contexts", nargs="+", type=int, help="context lengths in tokens (default: 1K to 1M)")
    attention.add_argument("--rows", nargs="+", type=int, help="batch sizes (default: 1, 8, 64)")
    attention.add_argument("--out", type=Path, help="folder for attention.csv and attention.txt")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "python -m infreal.bench") -> int:
    parser = make_parser(prog)
    args = parser.parse_args(argv)
    import torch

    from infreal.bench.attention import Options, run

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    try:
        options = Options.of(args)
    except ValueError as error:
        parser.error(str(error))
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
