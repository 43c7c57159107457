"""The kernels compile for A100 (sm_80) and H100/H200 (sm_90) on a machine that has neither.

In a child process without TRITON_INTERPRET: ahead-of-time compilation and the interpreter exclude each other.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.xdist_group("aot"),
]
WITH_DOT = {"decode_kernel", "prefill_kernel"}
ALL = WITH_DOT | {"merge_kernel", "write_kv_kernel", "copy_blocks_kernel"}


def compiled(*options: str) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "infreal.kernels.aot", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(kernels: list[dict]) -> None:
    from infreal.kernels.aot import SHARED_LIMIT_BYTES

    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_LIMIT_BYTES[kernel["arch"]], kernel
        assert kernel["registers"] > 0, kernel
        if kernel["dtype"] == "float32":
            continue  # not served on a GPU: fp32 products take no tensor core, and a few of its tiles spill
        assert kernel["spill_bytes"] == 0, kernel
        if kernel["kernel"] in WITH_DOT:
            assert kernel["has_mma"] and kernel["has_async_copy"], kernel


def test_every_kernel_compiles_for_sm_80_and_sm_90():
    kernels = compiled()
    assert {(k["kernel"], k["arch"]) for k in kernels} == {(name, arch) for name in ALL for arch in (80, 90)}
    check(kernels)


@pytest.mark.slow
def test_every_shape_and_dtype_compiles():
    check(compiled("--all"))
