"""Decode MicroAttention against the fp64 reference, and scenarios S2, S3, S5–S8."""

import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_reference import DEVICE, GARBAGE, Case, close, make_case, reference_output, reference_state

from infreal.kernels import Partial, merge, micro_attention, torch_backend

EDGES = [0, 1, 15, 16, 17]


def attend(case: Case, backend: str, **changes) -> Partial:
    args = {"q": case.q, "block_table": case.block_table, "num_local_tokens": case.num_tokens} | changes
    return micro_attention(kv_pool=case.kv_pool, layer=case.layer, scale=case.scale, backend=backend, **args)


def nan_state(shape) -> Partial:
    out = Partial.empty(shape, DEVICE)
    for tensor in (out.acc, out.m, out.e):
        tensor.fill_(torch.nan)
    return out


def check_rows(case: Case, state: Partial) -> None:
    """Every row's acc, m, e and normalised output against the reference."""
    for row, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        acc, m, e = reference_state(case.q[row], k, v, case.scale)
        assert close(state.m[row], m, case.q.dtype)
        assert close(state.e[row] / max(len(k), 1), e / max(len(k), 1), case.q.dtype)
        output = reference_output(case.q[row], k, v, case.scale)
        assert close(state.output()[row], output, case.q.dtype)
        assert close(state.acc[row] / max(len(k), 1), acc / max(len(k), 1), case.q.dtype)


# Heads, head_dim, lengths and dtype vary together: each value of each occurs; the whole grid is below, marked slow.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "lengths", "dtype"),
    [
        (1, 1, 64, [*EDGES, 255, 256, 257], torch.float16),
        (8, 8, 64, [0, 17], torch.float32),
        (8, 2, 128, [255, 1], torch.bfloat16),
        (9, 3, 80, [16, 257], torch.float16),
        (48, 2, 80, [15, 33], torch.float32),
        (40, 40, 128, [3], torch.bfloat16),
        (8, 1, 128, [1025, 0], torch.float16),
    ],
)
def test_decode_equals_the_reference(backend, heads, kv_heads, head_dim, lengths, dtype):
    case = make_case(lengths, heads, kv_heads, head_dim, dtype)
    check_rows(case, attend(case, backend))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("pair", "head_dim"),
    list(itertools.product([(1, 1), (8, 8), (8, 2), (9, 3), (48, 2), (40, 40)], [64, 80, 128])),
    ids=str,
)
def test_decode_equals_the_reference_over_the_whole_grid(backend, pair, head_dim, dtype):
    heads, kv_heads = pair
    case = make_case([*EDGES, 255, 257, 1030 // kv_heads], heads, kv_heads, head_dim, dtype)
    check_rows(case, attend(case, backend))


def test_s2_every_slot_is_written_and_rows_do_not_know_their_neighbours(backend):
    case = make_case([*EDGES, 333])
    together = attend(case, backend, out=nan_state(case.q.shape))
    check_rows(case, together)
    assert not torch.isnan(torch.cat([together.acc.flatten(), together.m.flatten(), together.e.flatten()])).any()
    for row in (0, 2, 5):
        one = slice(row, row + 1)
        alone = attend(
            case, backend, q=case.q[one], block_table=case.block_table[one], num_local_tokens=case.num_tokens[one]
        )
        for a, b in zip(("acc", "m", "e"), (together[one].acc, together[one].m, together[one].e), strict=True):
            assert torch.equal(getattr(alone, a), b)


def test_s3_nan_outside_the_valid_slots_is_never_seen(backend):
    case = make_case([5, 31], dtype=torch.float16)
    assert torch.isnan(case.kv_pool[:, case.layer]).any(), "the pool of a case holds NaN"
    assert torch.isfinite(attend(case, backend).acc).all()


@pytest.mark.parametrize("first", [0, 5])
def test_consecutive_blocks_equal_scattered_ones(first):
    scattered = make_case([20 * 16], heads=8, kv_heads=8, head_dim=128)
    pool = torch.full((first + 21, *scattered.kv_pool.shape[1:]), torch.nan)
    pool[first : first + 20] = scattered.kv_pool[scattered.block_table[0, :20].long()]
    run = replace(scattered, kv_pool=pool, block_table=torch.arange(first, first + 20, dtype=torch.int32)[None])
    check_rows(scattered, attend(scattered, "torch"))
    check_rows(run, attend(run, "torch"))


def test_s5_equal_scores_by_the_hundred_thousand():
    """Merged output 1 within 1e-5, and the packet on the wire is finite (unnormalised in fp16 it would overflow)."""
    total, parts = 100_000, 4
    pool = torch.zeros((total // parts // 16 + 1, 1, 2, 16, 1, 64))
    pool[:, :, 1] = 1.0
    table = torch.arange(len(pool), dtype=torch.int32)[None]
    length = torch.tensor([total // parts], dtype=torch.int32)
    buffer = torch.empty(parts, 64 + 2)
    packets = Partial.packed(buffer, 1, 1, 64)
    for part in range(parts):
        out = packets[part]
        micro_attention(torch.ones(1, 1, 64), pool, table, length, layer=0, scale=1.0, backend="torch", out=out)
    assert torch.isfinite(buffer).all()
    for backend in ("torch", "triton"):
        merged = merge(Partial.packed(buffer.to(DEVICE), 1, 1, 64), backend=backend)
        assert merged.e.item() == total
        assert close(merged.output(), np.ones((1, 1, 64)))


BEYOND_INT32 = """
import torch
from infreal.kernels import micro_attention
ELEMENTS = 2 * 16 * 8 * 128                       # of a block
block = 2**31 // ELEMENTS + 3
pool = torch.empty((block + 1, 1, 2, 16, 8, 128), dtype=torch.float16, device={device!r})   # 4 GB, touched in one place
torch.manual_seed(0)
pool[block] = torch.randn(pool.shape[1:])
table, length = torch.tensor([[block]], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
q = torch.randn(1, 8, 128).half()
q, table, length = (t.to({device!r}) for t in (q, table, length))
out = micro_attention(q, pool, table, length, layer=0, scale=0.1, backend={backend!r}).output()
k, v = pool[block, 0].double()
want = torch.einsum("ht,thd->hd", torch.softmax(0.1 * torch.einsum("hd,thd->ht", q[0].double(), k), 1), v)
print("error", (out[0] - want).abs().max().item())
"""


def run_beyond_int32(backend: str, prelude: str = "") -> subprocess.CompletedProcess:
    """In a child process: offsets that wrap around may crash it, and the virtual memory is given back."""
    script = prelude + BEYOND_INT32.format(device=DEVICE, backend=backend)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_s6_a_block_beyond_two_billion_elements(backend):
    done = run_beyond_int32(backend)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-3


@pytest.mark.slow
def test_s6_can_fail_with_32_bit_offsets():
    """The guard guarded: the same kernel with its cast of the block id taken out reads elsewhere, or crashes."""
    prelude = """
import inspect, sys, importlib.util, pathlib, tempfile
spec = importlib.util.find_spec("infreal.kernels.triton_common")
source = pathlib.Path(spec.origin).read_text()
narrow = source.replace(".to(tl.int64)\\n    offsets", "\\n    offsets")
assert narrow != source
path = pathlib.Path(tempfile.mkdtemp(), "triton_common.py")
path.write_text(narrow)
spec = importlib.util.spec_from_file_location("infreal.kernels.triton_common", path)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
"""
    done = run_beyond_int32("triton", prelude)
    assert done.returncode != 0 or not float(done.stdout.split()[-1]) < 1e-3


def test_s7_a_reused_table_with_garbage_beyond_the_row(backend):
    """The row shrank: ids of its former blocks and of no block at all follow, and the pool there holds NaN."""
    case = make_case([100])
    case.block_table[0, 2:7] = torch.tensor([GARBAGE, -1, -(2**31), 2**31 - 1, 0], dtype=torch.int32)
    short = attend(case, backend, num_local_tokens=torch.tensor([20], dtype=torch.int32, device=DEVICE))
    assert close(short.output()[0], reference_output(case.q[0], case.keys[0][:20], case.values[0][:20], case.scale))


@pytest.mark.parametrize("num_segments", [1, 4])
def test_without_numba_the_results_are_the_same(monkeypatch, num_segments):
    case = make_case([0, 1, 127, 128, 129, 300])
    compiled = attend(case, "torch")
    monkeypatch.setattr(torch_backend, "HAS_NUMBA", False)
    monkeypatch.setattr(torch_backend, "SEGMENT_TOKENS", 320 // num_segments)
    plain = attend(case, "torch")
    for name in ("acc", "m", "e"):
        assert torch.allclose(getattr(compiled, name), getattr(plain, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inference", [True, False])
def test_a_long_row_is_cut_over_the_threads(two_threads, monkeypatch, inference):
    """With small constants; also under inference mode, which belongs to a thread."""
    monkeypatch.setattr(torch_backend, "MIN_PART_BYTES", 1)
    case = make_case([200, 0, 31, 97])
    with torch.inference_mode(inference):
        out = micro_attention(
            case.q, case.kv_pool, case.block_table, case.num_tokens, layer=1, scale=case.scale, backend="torch"
        ).output()
    assert out.is_inference() == inference
    for row in range(4):
        expected = reference_output(case.q[row], case.keys[row], case.values[row], case.scale)
        assert close(out[row], expected)


def test_the_result_does_not_depend_on_the_number_of_rows(two_threads, monkeypatch):
    monkeypatch.setattr(torch_backend, "MIN_PART_BYTES", 1)
    case = make_case([200, 97])
    args = {"layer": 1, "scale": case.scale, "backend": "torch"}
    both = micro_attention(case.q, case.kv_pool, case.block_table, case.num_tokens, **args)
    one = micro_attention(case.q[1:], case.kv_pool, case.block_table[1:], case.num_tokens[1:], **args)
    assert torch.equal(one.acc[0], both.acc[1]) and torch.equal(one.e[0], both.e[1])


GUARDED = """
import ctypes, mmap
import torch
from infreal.kernels import micro_attention, prefill_micro_attention

def at_the_end_of_its_page(values, dtype):
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
    tensor = torch.frombuffer(memory, dtype=dtype, count=page // dtype.itemsize)[-len(values):]
    tensor.copy_(torch.tensor(values, dtype=dtype))
    return tensor

pool = torch.randn(2, 1, 2, 16, 1, 64)
table = at_the_end_of_its_page([1], torch.int32).view(1, 1)  # one block: less than a tile of the kernels
length = at_the_end_of_its_page([5], torch.int32)
start = at_the_end_of_its_page([0, 3], torch.int32)
for backend in ("torch", "triton"):
    options = dict(layer=0, scale=0.1, backend=backend)
    print(micro_attention(torch.randn(1, 2, 64), pool, table, length, **options).e.sum() > 0)
    print(prefill_micro_attention(torch.randn(3, 2, 64), start, pool, table, length, length, **options).e.sum() > 0)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="guard pages are for kernels that run on the CPU")
def test_s7_nothing_is_read_beyond_the_end_of_an_index():
    """Behind the table, the lengths and the starts lies a page that must not be touched: the child process would crash."""
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["tensor(True)"] * 4, done.stderr


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (48, 2, 128), (8, 8, 80), (9, 3, 128), (48, 2, 64), (8, 8, 128)]
)
def test_s8_each_head_equals_its_own_single_head(backend, heads, kv_heads, head_dim):
    """KV heads are independent draws: a head that read a neighbour's K or V would be far off."""
    case = make_case([21], heads, kv_heads, head_dim)
    state = attend(case, backend)
    for head in range(0, heads, max(1, heads // 6)):
        kv_head = head // (heads // kv_heads)
        k, v = (t[0][:, kv_head : kv_head + 1] for t in (case.keys, case.values))
        single = reference_output(case.q[0, head : head + 1], k, v, case.scale)
        assert close(state.output()[0, head : head + 1], single)


def test_queries_may_be_a_view_of_a_fused_projection(backend):
    case = make_case([17, 40])
    fused = torch.randn(2, 12, 64, device=DEVICE)
    fused[:, 2:10] = case.q
    check_rows(case, attend(case, backend, q=fused[:, 2:10]))


def test_an_empty_batch_is_fine(backend):
    case = make_case([3])
    none = attend(case, backend, q=case.q[:0], block_table=case.block_table[:0], num_local_tokens=case.num_tokens[:0])
    assert none.acc.shape == (0, 8, 64)


def test_long_rows_take_longer_splits_and_large_batches_take_slices(monkeypatch):
    """With small constants: a row beyond MAX_SPLITS splits, programs that walk over several units, slices of rows."""
    from infreal.kernels import triton_backend, triton_decode

    monkeypatch.setattr(triton_decode, "SPLIT_TOKENS", 32)
    monkeypatch.setattr(triton_decode, "MAX_SPLITS", 4)
    monkeypatch.setattr(triton_decode, "TARGET_PROGRAMS", 3)
    monkeypatch.setattr(triton_backend, "SCRATCH_BYTES", 1 << 13)
    case = make_case([300, 0, 1, 33, 128, 129], heads=4, kv_heads=1)
    check_rows(case, attend(case, "triton"))
