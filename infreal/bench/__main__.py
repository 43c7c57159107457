"""`python -m infreal.bench attention|sharing|exchange|actors|ranks`: measures and prints a table.

attention: decode MicroAttention and its rivals; writes a profile CSV. sharing: what KV on other instances costs an iteration.
exchange: messages between two processes over the transport, beside bare gloo. actors: the same requests in one process and on Ray.
ranks: what orders and collectives cost an instance of two ranks.
"""

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
    sharing = commands.add_parser("sharing", help="decode iterations with a share of the KV on other instances")
    sharing.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    sharing.add_argument("--backend", choices=("torch", "triton"), help="default: triton on cuda, torch on cpu")
    sharing.add_argument("--threads", type=int, help="threads of torch on the CPU (default: as torch has it)")
    sharing.add_argument(
        "--context", type=int, default=4096, metavar="TOKENS", help="of each request (default: %(default)s)"
    )
    sharing.add_argument("--rows", type=int, default=1, help="requests in the batch (default: %(default)s)")
    actors = commands.add_parser("actors", help="instances as pinned Ray actors, beside instances in one process")
    actors.add_argument("--tokens", type=int, default=200, help="output tokens of each request (default: %(default)s)")
    exchange = commands.add_parser("exchange", help="queries and block moves between two processes, beside bare gloo")
    exchange.add_argument("--out", type=Path, metavar="CSV", help="write case, metric, value there")
    ranks = commands.add_parser("ranks", help="an instance of two ranks: fan-out of orders, and who waits for whom")
    ranks.add_argument("--rows", type=int, default=8, help="requests in the batch (default: %(default)s)")
    ranks.add_argument(
        "--context", type=int, default=512, metavar="TOKENS", help="of each request (default: %(default)s)"
    )
    ranks.add_argument("--trace", type=Path, metavar="JSON", help="write the spans of both ranks there, for Perfetto")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "python -m infreal.bench") -> int:
    parser = make_parser(prog)
    args = parser.parse_args(argv)
    import torch

    if args.command == "exchange":
        return exchange_main(args)
    if args.command == "actors":
        return actors_main(parser, args)
    if args.command == "ranks":
        return ranks_main(parser, args)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if args.command == "sharing":
        return sharing_main(parser, args)
    from infreal.bench.attention import Options, run

    try:
        options = Options.of(args)
    except ValueError as error:
        parser.error(str(error))
    run(options)
    return 0


def sharing_main(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    import torch

    from infreal.bench.profile import device_name, software
    from infreal.bench.sharing import BLOCK_TOKENS, measure_sharing, report
    from infreal.generate import default_backend, default_device
    from infreal.model import config_from_hf, random_decoder
    from infreal.model.loading import SMOLLM2_SHAPE

    if args.context < 4 * BLOCK_TOKENS or args.rows < 1 or (args.threads or 1) < 1:
        parser.error(
            f"--context {args.context}, --rows {args.rows} (allowed: {4 * BLOCK_TOKENS} tokens or more, 1 or more)"
        )
    if args.threads:
        torch.set_num_threads(args.threads)
    device = args.device or default_device()
    backend = args.backend or default_backend(device)
    decoder = random_decoder(config_from_hf(SMOLLM2_SHAPE, "bench"), 0, torch.float32, device)
    print(
        f"{device_name(device)}, {software(backend)}; SmolLM2-135M's shape, fp32, {args.rows} × {args.context:,} tokens"
    )
    print(report(measure_sharing(decoder, args.rows, args.context, backend), decoder.config.num_layers))
    return 0


def actors_main(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from infreal.bench.actors import measure_actors, report
    from perfmodel.errors import InputError

    if not 0 < args.tokens <= 1000:
        parser.error(f"--tokens {args.tokens} (allowed: 1 to 1000)")
    try:
        print(report(list(measure_actors(args.tokens))))
    except InputError as error:
        parser.error(str(error))
    return 0


def ranks_main(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from infreal.bench.ranks import Case, measure_ranks

    if not (0 < args.rows <= 64 and 0 < args.context <= 8192):
        parser.error(f"--rows {args.rows}, --context {args.context} (allowed: 1 to 64, 1 to 8192)")
    print(measure_ranks(Case(args.rows, args.context), args.trace))
    return 0


def exchange_main(args: argparse.Namespace) -> int:
    from infreal.bench.exchange import measure_exchange, write_findings

    findings = []
    for finding in measure_exchange():
        findings.append(finding)
        print(finding, flush=True)
    if args.out:
        with args.out.open("w", newline="", encoding="utf-8") as file:
            write_findings(findings, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
