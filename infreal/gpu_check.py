"""`python -m infreal.gpu_check [--device cuda|cpu] [--out DIR]`: is this machine fit to serve, and how fast are its operators?

Kernels against fp64, the model on both backends, several instances that lend each other memory against a single one, and a profile
of the operators, in a few minutes; with torch, triton, numpy and this repository alone. Into DIR go

    profile.csv                            infsim calibrate --from profile=DIR/profile.csv --out PACK
    events.jsonl, config.yaml, trace.csv   infsim replay DIR/events.jsonl --out DIR/real
                                           infsim run DIR/config.yaml --out DIR/simulated
                                           infsim compare DIR/real DIR/simulated
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path

import torch

from infreal.bench.profile import device_name, software, write_profile
from infreal.check import Verdict
from infreal.check.kernels import check_kernels
from infreal.check.operators import profile_operators
from infreal.check.sharing import check_sharing
from infreal.cli import OneLineParser
from infreal.generate import default_backend, default_device
from infreal.model import Decoder, Row, config_from_hf, make_batch, random_decoder
from infreal.model.loading import SMOLLM2_SHAPE

BLOCK_TOKENS, NUM_BLOCKS = 16, 24
CHUNKS = (100, 57, 1, 1)  # of a prompt, then decode


def main(argv: Sequence[str] | None = None, prog: str = "python -m infreal.gpu_check") -> int:
    """Exit code 0; 1 where a check failed, 2 for wrong usage."""
    parser = make_parser(prog)
    args = parser.parse_args(argv)
    device = args.device or default_device()
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here (allowed: cpu)")
    args.out.mkdir(parents=True, exist_ok=True)
    started_s, backend = time.monotonic(), default_backend(device)
    print(f"{device_name(device)}, {software(backend)}")
    decoder = random_decoder(config_from_hf(SMOLLM2_SHAPE, "gpu_check"), 0, torch.float32, device)
    failed = 0
    for verdict in chain(
        check_kernels(device, backend),
        check_model(decoder, backend),
        check_sharing(decoder, backend, device_name(device), args.out),
    ):
        failed += not verdict.holds
        print(f"[{time.monotonic() - started_s:4.0f} s] {verdict}", flush=True)
    write_profile(args.out / "profile.csv", list(profile_operators(device, backend)))
    print(f"[{time.monotonic() - started_s:4.0f} s] {args.out}: profile.csv, events.jsonl, config.yaml, trace.csv")
    return int(failed > 0)


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=prog, description="Check kernels, model and shared memory on one device, and profile it."
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), metavar="DIR", help="default: %(default)s")
    return parser


def check_model(decoder: Decoder, backend: str) -> Iterator[Verdict]:
    """A prompt in chunks and decode rows, on the served backend, against whole prompts on the torch twin."""
    ids = torch.randint(decoder.config.vocab_size, (sum(CHUNKS),), generator=torch.Generator().manual_seed(0)).tolist()
    ends = list(accumulate(CHUNKS))
    pool = decoder.new_pool(NUM_BLOCKS, BLOCK_TOKENS).fill_(torch.nan)
    served = torch.stack(
        [last_logits(decoder, pool, ids, end - n, end, backend) for n, end in zip(CHUNKS, ends, strict=True)]
    )
    whole = torch.stack([last_logits(decoder, pool.fill_(torch.nan), ids, 0, end, "torch") for end in ends])
    error, limit = float((served - whole).abs().max()), 1e-4 * float(whole.abs().max())
    found = f"largest difference of a logit {error:.1e} (at most {limit:.1e}, 1e-4 of the largest)"
    yield Verdict(f"model, chunks and decode on {backend} against whole prompts on torch", error <= limit, found)


def last_logits(
    decoder: Decoder, pool: torch.Tensor, ids: list[int], start: int, end: int, backend: str
) -> torch.Tensor:
    """Logits after ids[start:end], of which those before `start` are in the pool."""
    batch = make_batch([Row(ids[start:end], start, range(NUM_BLOCKS))], BLOCK_TOKENS, decoder.device)
    return decoder.forward(batch, decoder.local_attention(batch, pool, backend))[0]


if __name__ == "__main__":
    sys.exit(main())
