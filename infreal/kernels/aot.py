"""Compiles every Triton kernel for GPUs that are not there: `python -m infreal.kernels.aot [--arch 80 90] [--all]`.

Prints one JSON line per kernel, shape and architecture: is a tensor-core instruction in it, are copies asynchronous
(the loop is pipelined), how much shared memory, how many registers, how many bytes spilled. Needs a process without
TRITON_INTERPRET; a GPU is not needed, nor is a driver. Checked with Triton 3.9 and 3.6.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from infreal.kernels.launch import Launch
from infreal.kernels.partial import Partial
from infreal.kernels.triton_blocks import copy_blocks_launch, write_kv_launch
from infreal.kernels.triton_decode import decode_launch
from infreal.kernels.triton_merge import merge_launch
from infreal.kernels.triton_prefill import prefill_launch

# Shared memory that one thread block may use. CUDA C++ Programming Guide, technical specifications per compute capability.
SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
POINTER_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# (model, heads, kv_heads, head_dim): the shapes that ship. The first is compiled by default.
SHAPES = (
    ("llama2-70b", 64, 8, 128),
    ("llama2-7b", 32, 32, 128),
    ("llama2-13b", 40, 40, 128),
    ("smollm2-135m", 9, 3, 64),
    ("head-dim-80", 32, 32, 80),
)


@dataclass(frozen=True)
class Compiled:
    kernel: str
    shape: str
    dtype: str
    arch: int
    has_mma: bool
    has_async_copy: bool
    shared_bytes: int
    registers: int
    spill_bytes: int


def launches(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Iterator[Launch]:
    """Every kernel as it is launched for this shape, over tensors without memory."""
    rows, tokens = 8, 512

    def new(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def index(*shape: int) -> torch.Tensor:
        return new(*shape, dtype=torch.int32)

    pool = new(4096, 32, 2, 16, kv_heads, head_dim)
    table = index(rows, 4096)
    parts = Partial.empty((128, rows, heads, head_dim), "meta")
    yield decode_launch(new(rows, heads, head_dim), pool[:, 0], table, index(rows), 0.1, parts)
    queries, chunk = new(tokens, heads, head_dim), Partial.empty((tokens, heads, head_dim), "meta")
    for offset in (index(rows), None):
        yield prefill_launch(queries, index(rows + 1), pool[:, 0], (table, index(rows), offset), 0.1, chunk)
    for num_parts in (4, 128):
        yield merge_launch(parts[:num_parts], parts[0])
    new_kv = new(tokens, kv_heads, head_dim)
    yield write_kv_launch(new_kv, new_kv, pool[:, 0], index(tokens))
    for scatter in (False, True):
        yield copy_blocks_launch(pool, index(16), new(16, *pool.shape[1:]), scatter=scatter)


def compile_launch(launch: Launch, arch: int) -> Any:
    """The compiled kernel, specialised the way the runtime does: integers equal to 1, divisibility by 16."""
    names = launch.kernel.arg_names
    signature, constants, attrs = {}, dict(launch.constants), {}
    for i, (name, value) in enumerate(zip(names, launch.args, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = POINTER_TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            constants[name] = 1
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attrs[(i,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = {name: signature[name] for name in names}
    source = ASTSource(fn=launch.kernel, signature=ordered, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread. Local memory is where spilled registers go: 0 is no spill."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def inspect(launch: Launch, shape: str, dtype: torch.dtype, arch: int) -> Compiled:
    compiled = compile_launch(launch, arch)
    ptx = compiled.asm["ptx"]
    registers, spill_bytes = resources(compiled.asm["cubin"])
    return Compiled(
        kernel=launch.name,
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        arch=arch,
        has_mma=re.search(r"\b(mma|wgmma)\S*\.sync", ptx) is not None,
        has_async_copy="cp.async" in ptx,
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        spill_bytes=spill_bytes,
    )


def inspect_all(archs: Iterable[int], shapes: Iterable[tuple], dtypes: Iterable[torch.dtype]) -> Iterator[Compiled]:
    for name, *dims in shapes:
        for dtype in dtypes:
            for launch in launches(*dims, dtype):
                for arch in archs:
                    yield inspect(launch, name, dtype, arch)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infreal.kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(SHARED_LIMIT_BYTES), help="compute capabilities")
    parser.add_argument("--all", action="store_true", help="every shape and dtype (minutes), not one shape in fp16")
    args = parser.parse_args()
    shapes, dtypes = (SHAPES, DTYPES) if args.all else (SHAPES[:1], (torch.float16,))
    for compiled in inspect_all(args.arch, shapes, dtypes):
        print(json.dumps(asdict(compiled)), flush=True)


if __name__ == "__main__":
    main()
