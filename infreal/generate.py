"""`infreal generate`: text from one instance, streamed. Also the plain loop over a model that tests and benchmarks use.

One request, its own small pool, no scheduler: what a placement over several instances must reproduce token for token.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from infreal.cli import OneLineParser
from infreal.kernels import BACKENDS
from infreal.model import Checkpoint, Decoder, ModelError, Row, load_decoder, make_batch, open_checkpoint
from infreal.model.config import DTYPES
from infreal.model.weights import check_memory
from perfmodel.errors import InputError, unknown

BLOCK_TOKENS = 16
CHUNK_TOKENS = 512  # of the prompt in one iteration

Pick = Callable[[torch.Tensor], int]  # logits [vocab_size] fp32 → the next token


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """backend, dtype, device None: triton and the model's own dtype on a GPU where there is one, torch and float32 else.

    temperature 0 is greedy; above it, tokens are drawn with `seed` from the smallest set of probability `top_p`.
    """

    max_tokens: int = 64
    backend: str | None = None
    dtype: str | None = None
    device: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def main(argv: Sequence[str], prog: str = "infreal generate") -> int:
    """The command: exit code 0; 2 with one line on stderr for wrong input; 130 where interrupted."""
    args = vars(make_parser(prog).parse_args(argv))
    model, prompt = args.pop("model"), args.pop("prompt")
    try:
        return generate(model, prompt, GenerateOptions(**args))
    except InputError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # the text so far is what was wanted
        print()
        return 130


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=prog, description="Stream the continuation of a prompt from one instance.")
    default = GenerateOptions()
    parser.add_argument("--model", required=True, help="a Hugging Face directory, a .gguf file, or smollm2")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens, metavar="N", help="default: %(default)s")
    parser.add_argument("--backend", help="torch or triton (default: triton on a GPU)")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 (default: float32 on a CPU, else the model's)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU where there is one)")
    parser.add_argument("--temperature", type=float, default=default.temperature, help="0 is greedy (the default)")
    parser.add_argument(
        "--top-p", type=float, default=default.top_p, help="draw from the likeliest tokens of this share"
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="of the draws (default: %(default)s)")
    return parser


@contextmanager
def model_input() -> Iterator[None]:
    """What is wrong with a model's files is wrong input of the command: one line, exit 2."""
    try:
        yield
    except ModelError as error:
        raise InputError(str(error)) from error


def generate(model: str, prompt: str, options: GenerateOptions | None = None) -> int:
    """Stream the continuation of `prompt` to stdout. Raises InputError; returns the exit code 0."""
    options = options or GenerateOptions()
    check_options(options)
    with model_input():
        checkpoint = open_checkpoint(model)
        for piece in stream_text(checkpoint, prompt, options):
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def stream_text(checkpoint: Checkpoint, prompt: str, options: GenerateOptions) -> Iterator[str]:
    """Pieces of text as they become whole. The prompt is checked before the weights are read."""
    tokenizer = checkpoint.tokenizer()
    prompt_ids = tokenizer.encode(prompt)
    check_lengths(len(prompt_ids), options.max_tokens, checkpoint.config.max_context_tokens)
    device = options.device or default_device()
    backend = options.backend or default_backend(device)
    check_backend(backend, device)
    decoder = load_decoder(checkpoint, _dtype(options.dtype, device), device)
    ids = generate_ids(
        decoder,
        prompt_ids,
        max_tokens=options.max_tokens,
        stop_ids=tokenizer.stop_ids,
        pick=picker(options),
        backend=backend,
    )
    return tokenizer.stream(ids)


def generate_ids(
    decoder: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    stop_ids: Sequence[int] = (),
    pick: Pick | None = None,
    backend: str = "torch",
) -> Iterator[int]:
    """New tokens, at most `max_tokens`, up to a stop token (not yielded). pick None: greedy."""
    pick = pick or greedy
    num_blocks = -(-(len(prompt_ids) + max_tokens) // BLOCK_TOKENS)
    num_bytes = num_blocks * decoder.config.block_bytes(BLOCK_TOKENS, decoder.dtype)
    check_memory(f"{num_blocks} KV blocks of {BLOCK_TOKENS} tokens", num_bytes, decoder.device)
    pool = decoder.new_pool(num_blocks, BLOCK_TOKENS)

    def step(new_ids: Sequence[int], position: int) -> torch.Tensor:
        batch = make_batch([Row(new_ids, position, range(num_blocks))], BLOCK_TOKENS, decoder.device)
        return decoder.forward(batch, decoder.local_attention(batch, pool, backend))[0]

    for start in range(0, len(prompt_ids), CHUNK_TOKENS):
        logits = step(prompt_ids[start : start + CHUNK_TOKENS], start)
    for position in range(len(prompt_ids), len(prompt_ids) + max_tokens):
        token = pick(logits)
        if token in stop_ids:
            return
        yield token
        if position + 1 < len(prompt_ids) + max_tokens:
            logits = step([token], position)


def greedy(logits: torch.Tensor) -> int:
    return int(logits.argmax())


def picker(options: GenerateOptions) -> Pick:
    """How the next token is chosen."""
    if options.temperature == 0:
        return greedy
    generator = torch.Generator().manual_seed(options.seed)

    def sample(logits: torch.Tensor) -> int:
        probabilities, ids = (logits.cpu() / options.temperature).softmax(0).sort(descending=True)
        before = probabilities.cumsum(0) - probabilities
        kept = probabilities * (before < options.top_p)  # the most likely token always stays
        return int(ids[torch.multinomial(kept, 1, generator=generator)])

    return sample


def check_options(options: GenerateOptions) -> None:
    if options.max_tokens < 1:
        raise InputError(f"--max-tokens: {options.max_tokens} (allowed: 1 or more)")
    if options.temperature < 0:
        raise InputError(f"--temperature: {options.temperature} (allowed: 0, greedy, or more)")
    if not 0 < options.top_p <= 1:
        raise InputError(f"--top-p: {options.top_p} (allowed: above 0, up to 1)")
    if options.device is not None:
        check_device(options.device)
    if options.backend not in (None, *BACKENDS):
        raise unknown("backend", options.backend, BACKENDS)
    if options.dtype not in (None, *DTYPES):
        raise unknown("dtype", options.dtype, DTYPES)


def check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"--device: {name!r} is not here (allowed: cpu, or cuda:N of a GPU of this machine)"
        ) from error


def check_lengths(num_prompt_tokens: int, max_tokens: int, max_context_tokens: int) -> None:
    if num_prompt_tokens == 0:
        raise InputError("--prompt: no token in it (allowed: at least one)")
    if num_prompt_tokens + max_tokens > max_context_tokens:
        asked = f"{num_prompt_tokens} tokens of prompt and --max-tokens {max_tokens}"
        raise InputError(f"{asked} are more than the model's context of {max_context_tokens}")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_backend(device: str) -> str:
    return "triton" if device.startswith("cuda") else "torch"


def check_backend(backend: str, device: str) -> None:
    if backend != "triton":
        return
    if find_spec("triton") is None:
        raise InputError("--backend triton: the package triton is not installed (allowed: torch)")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError("--backend triton: no CUDA device here (allowed: torch; TRITON_INTERPRET=1 is for tests)")


def _dtype(name: str | None, device: str) -> torch.dtype | None:
    if name is not None:
        return DTYPES[name]
    return torch.float32 if device == "cpu" else None
