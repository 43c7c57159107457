"""The `infreal` command: what runs on hardware. Without the extra `[real]` it says what to install and exits 2."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence

from infreal.cli import OneLineParser

MISSING = "infreal: torch is not installed; install the extra: pip install 'infsim[real]'"


def bench(argv: Sequence[str]) -> int:
    from infreal.bench.__main__ import main as bench_main

    return bench_main(argv, prog="infreal bench")


def generate(argv: Sequence[str]) -> int:
    from infreal.generate import main as generate_main

    return generate_main(argv, prog="infreal generate")


def run(argv: Sequence[str]) -> int:
    from infreal.run import main as run_main

    return run_main(argv, prog="infreal run")


def profile(argv: Sequence[str]) -> int:
    from infreal.profile import main as profile_main

    return profile_main(argv, prog="infreal profile")


def validate(argv: Sequence[str]) -> int:
    from infreal.validate import main as validate_main

    return validate_main(argv, prog="infreal validate")


# name: (what does it, help)
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "run": (run, "sweep serving policies over a workload on this machine"),
    "generate": (generate, "stream text from a model on this machine"),
    "profile": (profile, "measure this machine for the cost model"),
    "validate": (validate, "run, simulate and compare on this machine"),
    "bench": (bench, "benchmarks of the kernels (attention)"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="infreal", description="Infinite-LLM on hardware.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 wrong usage or nothing installed to run on."""
    if importlib.util.find_spec("torch") is None:
        print(MISSING, file=sys.stderr)
        return 2
    args, rest = make_parser().parse_known_args(argv)
    return COMMANDS[args.command][0](rest)


if __name__ == "__main__":
    sys.exit(main())
