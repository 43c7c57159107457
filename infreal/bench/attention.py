"""The attention benchmark: which cases, in which order, and what is measured for each."""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch

from infreal.bench.contenders import OURS, RIVALS, Call, Problem, Shape, ours, random_tensor
from infreal.bench.profile import ProfileRow, device_name, software, write_profile
from infreal.bench.report import report
from infreal.bench.timing import Timing, measure
from infreal.bench.wire import measure_rivals_on_the_wire
from infreal.kernels import Partial, merge
from infreal.kernels.partial import partial_bytes

MODELS = {
    "llama2-7b": (32, 32, 128),
    "llama2-13b": (40, 40, 128),
    "llama2-70b": (64, 8, 128),
}  # heads, KV heads, head_dim
CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
ROWS = (1, 8, 64)
PARTS = (2, 4, 8)
COPY_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}
CPU_KV_BYTES = 3 << 29  # 1.5 GiB: with the largest contender's copies it stays within a small machine
GPU_KV_FRAC = 0.4
Key = TypeVar("Key")


@dataclass(frozen=True)
class Options:
    device: str
    backend: str
    dtype: torch.dtype
    seconds: float
    kv_bytes: int
    shapes: tuple[Shape, ...]
    out: Path | None = None

    @classmethod
    def of(cls, args: Namespace) -> "Options":
        """From the command line. Raises ValueError for a model that is not known or a size that is not positive."""
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        sizes = [*(args.contexts or CONTEXTS), *(args.rows or ROWS), args.threads or 1, args.seconds, args.kv_gib or 1]
        if min(sizes) <= 0:
            raise ValueError(f"sizes must be above 0, not {min(sizes)}")
        unknown = sorted(set(args.models or ()) - set(MODELS))
        if unknown:
            raise ValueError(f"unknown model {unknown[0]!r} (known: {', '.join(MODELS)})")
        if args.threads:
            torch.set_num_threads(args.threads)
        cases = product(args.models or MODELS, args.contexts or CONTEXTS, args.rows or ROWS)
        return cls(
            device=device,
            backend=args.backend or ("triton" if device == "cuda" else "torch"),
            dtype=getattr(torch, args.dtype or ("float16" if device == "cuda" else "float32")),
            seconds=args.seconds,
            kv_bytes=int(args.kv_gib * 2**30) if args.kv_gib else largest_kv_bytes(device),
            shapes=tuple(Shape(model, *MODELS[model], rows, context) for model, context, rows in cases),
            out=args.out,
        )


def largest_kv_bytes(device: str) -> int:
    if device == "cpu":
        return CPU_KV_BYTES
    return int(GPU_KV_FRAC * torch.cuda.get_device_properties(0).total_memory)


@dataclass(frozen=True)
class Bench:
    """Where rows of the profile come from: what they have in common, and how they are made."""

    options: Options
    common: ProfileRow

    def row(self, operator: str, timing: Timing, **values: object) -> ProfileRow:
        times = {"time_s": timing.median_s, "time_s_std": timing.std_s, "repeats": timing.repeats}
        return replace(self.common, operator=operator, **times, **values)

    def measure(self, calls: Mapping[Key, Call]) -> dict[Key, Timing]:
        return measure(calls, self.options.device)


def run(options: Options) -> list[ProfileRow]:
    """Measures until done or out of time; prints the table; writes attention.csv and attention.txt where asked to."""
    say = _teller(options)
    common = ProfileRow(
        "", device_name(options.device), software(options.backend), str(options.dtype).removeprefix("torch.")
    )
    bench = Bench(options, replace(common, tensor_parallel=1))
    end_s = time.monotonic() + options.seconds
    rows = [measure_copy(bench)]
    for shape in in_order(options):
        if time.monotonic() > end_s:
            say(f"out of time before {_name(shape)}")
            break
        say(_name(shape))
        rows += measure_case(bench, shape, say)
    if time.monotonic() < end_s:
        rows += measure_rivals_on_the_wire(bench)
    text = report(rows)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_profile(options.out / "attention.csv", rows)
        (options.out / "attention.txt").write_text(text + "\n")
    return rows


def _teller(options: Options) -> Callable[[str], None]:
    start_s = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - start_s:5.0f} s] {text}", file=sys.stderr, flush=True)


def _name(shape: Shape) -> str:
    return f"{shape.model}, {shape.rows} × {shape.context_tokens:,} tokens"


def in_order(options: Options) -> list[Shape]:
    """The cases that fit, the small ones first: what time does not allow is the largest."""
    fitting = [shape for shape in options.shapes if shape.kv_bytes(options.dtype) <= options.kv_bytes]
    return sorted(fitting, key=lambda shape: (shape.kv_bytes(options.dtype), shape.model))


def measure_copy(bench: Bench) -> ProfileRow:
    """What the memory gives: bytes read plus bytes written of a large copy."""
    source = random_tensor((COPY_BYTES[bench.options.device],), torch.uint8, bench.options.device)
    target = torch.empty_like(source)
    timing = bench.measure({"copy": lambda: target.copy_(source)})["copy"]
    return bench.row("memory_copy", timing, num_bytes=2 * source.nbytes)


def measure_case(bench: Bench, shape: Shape, say: Callable[[str], None]) -> Iterator[ProfileRow]:
    problem = Problem(shape, bench.options.dtype, bench.options.device, bench.options.backend)
    sizes = {"rows": shape.rows, "context_tokens": shape.context_tokens, "heads": shape.heads}
    sizes |= {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    calls = {name: make(problem) for name, make in OURS.items()}
    calls |= dict(_rival_calls(problem, bench.options.kv_bytes, say))
    for name, timing in bench.measure(calls).items():
        yield bench.row(name, timing, num_bytes=shape.kv_bytes(bench.options.dtype), **sizes)
    del calls
    yield from _measure_parts(bench, problem, sizes)


def _rival_calls(problem: Problem, kv_bytes: int, say: Callable[[str], None]) -> Iterator[tuple[str, Call]]:
    """Rivals that are at hand, fit, and run; whichever fails is named and left out."""
    group = problem.shape.heads // problem.shape.kv_heads
    for name, make in RIVALS.items():
        if name == "sdpa_expanded" and group * problem.shape.kv_bytes(problem.dtype) > kv_bytes:
            continue
        try:
            call = make(problem)
            if call is not None:
                call()
                yield name, call
        except Exception as error:  # another's library: its faults are told, not ours to raise
            say(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _measure_parts(bench: Bench, problem: Problem, sizes: dict[str, int]) -> Iterator[ProfileRow]:
    """The same request over 2 to 8 parts: MicroAttention of all of them one after the other, and the merge alone."""
    shape, backend = problem.shape, bench.options.backend
    calls: dict[tuple[str, int], Call] = {}
    for num_parts in PARTS:
        attend = [ours(problem, problem.scattered_table, cut) for cut in _cuts(problem.blocks_per_row, num_parts)]
        state = Partial.stack([call() for call in attend])
        calls["merge", num_parts] = partial(merge, state, backend=backend)
        if shape.rows == 1:
            calls["decode_attention_in_parts", num_parts] = partial(_call_all, attend)
    for (name, num_parts), timing in bench.measure(calls).items():
        state_bytes = (num_parts + 1) * partial_bytes(shape.rows, shape.heads, shape.head_dim)
        num_bytes = state_bytes if name == "merge" else shape.kv_bytes(problem.dtype)
        yield bench.row(name, timing, ranks=num_parts, num_bytes=num_bytes, **sizes)


def _call_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _cuts(num_blocks: int, num_parts: int) -> Sequence[slice]:
    step = -(-num_blocks // num_parts)
    return [slice(first, min(first + step, num_blocks)) for first in range(0, num_blocks, step)]
