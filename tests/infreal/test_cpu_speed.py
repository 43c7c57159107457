"""`make bench`: the torch twin of decode MicroAttention against torch's own attention, as ratios within one run."""

import statistics
import time

import pytest
import torch
import torch.nn.functional as F

from infreal.bench.contenders import Problem, Shape, ours_run, ours_scattered, sdpa_contiguous, sdpa_expanded

ROUNDS = 7
MAX_RATIO = 1.0
MEMORY_BYTES = 9 << 30  # of the pool and, for grouped heads, its expanded copy
CASES = [
    (heads, kv_heads, rows, context)
    for heads, kv_heads in ((32, 32), (32, 8))
    for rows in (1, 8)
    for context in (32_768, 131_072)
    if 8 * rows * context * kv_heads * 128 <= MEMORY_BYTES
]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def medians_s(calls: dict, rounds: int = ROUNDS) -> dict[str, float]:
    """Interleaved, so that what else the machine does meets all alike."""
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start_s = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start_s)
    return {name: statistics.median(values) for name, values in times.items()}


@pytest.mark.bench
@pytest.mark.parametrize(("heads", "kv_heads", "rows", "context"), CASES)
def test_decode_is_not_slower_than_sdpa(threads, heads, kv_heads, rows, context):
    problem = Problem(Shape("bench", heads, kv_heads, 128, rows, context), torch.float32, "cpu", "torch")
    kv_bytes = problem.shape.kv_bytes(torch.float32)
    calls = {"runs": ours_run(problem), "scattered": ours_scattered(problem), "sdpa": sdpa_contiguous(problem)}
    if heads != kv_heads and (1 + heads // kv_heads) * kv_bytes <= MEMORY_BYTES:
        calls["sdpa expanded"] = sdpa_expanded(problem)
    copied = problem.kv_pool.view(-1)[: 1 << 27]
    target = torch.empty_like(copied)
    times = medians_s(calls | {"copy": lambda: target.copy_(copied)})
    best = min(times[name] for name in ("sdpa", "sdpa expanded") if name in times)
    rates = ", ".join(f"{name} {kv_bytes / times[name] / 1e9:.1f}" for name in calls)
    copy = 2 * copied.nbytes / times["copy"] / 1e9
    ratios = {name: times[name] / best for name in ("runs", "scattered")}
    print(
        f"\n{heads}/{kv_heads} heads, {rows} × {context:,}, {threads} threads: {rates}, copy {copy:.1f} GB/s; ratios {ratios}"
    )
    assert min(ratios.values()) <= MAX_RATIO, ratios


def test_what_is_timed_is_attention():
    """The contenders of the benchmark above, small, on the same values."""
    problem = Problem(Shape("small", 4, 2, 128, 2, 64), torch.float32, "cpu", "torch")
    pool = problem.kv_pool[problem.scattered_table.long(), 0]
    k, v = (pool[:, :, side].flatten(1, 2).transpose(1, 2) for side in (0, 1))
    expected = F.scaled_dot_product_attention(problem.q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)
    assert torch.allclose(ours_scattered(problem)().output(), expected, atol=1e-5)
