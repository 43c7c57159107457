"""Prefill MicroAttention against the fp64 reference: causal at an offset, remote prefixes, chunks that merge to the whole."""

import numpy as np
import pytest
import torch
from attention_reference import DEVICE, Case, close, make_case, reference_output, reference_state

from infreal.kernels import Partial, merge, micro_attention, prefill_micro_attention, torch_backend


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def prefill(case: Case, backend: str, query_start: list[int], offsets: list[int] | None, **changes) -> Partial:
    offset = None if offsets is None else index(*offsets)
    args = {"q": case.q, "num_kv_tokens": case.num_tokens, "block_table": case.block_table} | changes
    return prefill_micro_attention(
        query_start=index(*query_start),
        kv_pool=case.kv_pool,
        causal_offset=offset,
        layer=case.layer,
        scale=case.scale,
        backend=backend,
        **args,
    )


def check(case: Case, state: Partial, query_start: list[int], offsets: list[int] | None) -> None:
    """Each query against the tokens it may see; queries behind the last row see none."""
    output = state.output()
    for row, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        for i, token in enumerate(range(query_start[row], query_start[row + 1])):
            seen = len(k) if offsets is None else max(0, min(len(k), i + offsets[row] + 1))
            expected = reference_output(case.q[token], k[:seen], v[:seen], case.scale)
            assert close(output[token], expected, case.q.dtype), f"row {row}, query {i}"
            _, m, e = reference_state(case.q[token], k[:seen], v[:seen], case.scale)
            if seen:  # m may be any number near the largest score; what it stands for is m + log e
                assert close(state.m[token] + state.e[token].log(), m + np.log(e), case.q.dtype)
                assert ((state.m[token].cpu().numpy() - m) < np.log(seen) + 0.1).all()
            else:
                assert (state.m[token] == -torch.inf).all()
                assert (state.e[token] == 0).all()
    assert (state.m[query_start[-1] :] == -torch.inf).all()
    assert (state.acc[query_start[-1] :] == 0).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (1, 1, 64, torch.float32),
        (8, 2, 128, torch.float16),
        (9, 3, 80, torch.float32),
        (48, 2, 64, torch.bfloat16),
        (5, 5, 80, torch.float16),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_equals_the_reference(backend, heads, kv_heads, head_dim, dtype, causal):
    """Rows: a first chunk, a later chunk, no query, no KV, one query; then two tokens of padding."""
    lengths, query_start = [7, 40, 5, 0, 17], [0, 7, 12, 12, 14, 15]
    offsets = [0, 35, 4, 0, 16] if causal else None
    case = make_case(lengths, heads, kv_heads, head_dim, dtype, num_queries=17)
    state = prefill(case, backend, query_start, offsets)
    check(case, state, query_start, offsets)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (8, 2), (9, 3), (48, 2), (40, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_prefill_equals_the_reference_over_the_whole_grid(backend, heads, kv_heads, dtype):
    lengths, query_start, offsets = [257, 16, 300], [0, 30, 45, 65], [227, 0, -5]
    case = make_case(lengths, heads, kv_heads, 80, dtype, num_queries=65)
    check(case, prefill(case, backend, query_start, offsets), query_start, offsets)


def test_queries_before_the_first_kv_token_see_nothing(backend):
    """A negative offset: this instance holds later tokens than the first queries."""
    case = make_case([6], num_queries=9)
    state = prefill(case, backend, [0, 9], [-4])
    check(case, state, [0, 9], [-4])
    assert (state.e[:4] == 0).all()


def test_a_remote_prefix_and_the_local_tail_merge_to_the_whole(backend):
    """20 tokens on one creditor, 16 on another, the chunk's own 10 with a causal mask: as if they lay together."""
    case = make_case([20, 16, 10], num_queries=10)
    parts = [
        prefill(
            case, backend, [0, 10], None, block_table=case.block_table[i][None], num_kv_tokens=case.num_tokens[i][None]
        )
        for i in (0, 1)
    ]
    own = {"block_table": case.block_table[2][None], "num_kv_tokens": case.num_tokens[2][None]}
    merged = merge([*parts, prefill(case, backend, [0, 10], [0], **own)], backend=backend)
    for i in range(10):
        k, v = (torch.cat([*t[:2], t[2][: i + 1]]) for t in (case.keys, case.values))
        assert close(merged.output()[i], reference_output(case.q[i], k, v, case.scale))


def test_one_query_per_row_is_decode(backend):
    case = make_case([33, 0, 5])
    chunked = prefill(case, backend, [0, 1, 2, 3], None)
    decoded = micro_attention(
        case.q, case.kv_pool, case.block_table, case.num_tokens, layer=1, scale=case.scale, backend=backend
    )
    assert close(chunked.output(), decoded.output().cpu().numpy())


def test_out_is_filled_completely(backend):
    case = make_case([9, 0], num_queries=8)
    out = Partial.empty(case.q.shape, DEVICE)
    for tensor in (out.acc, out.m, out.e):
        tensor.fill_(torch.nan)
    assert prefill(case, backend, [0, 3, 6], [6, 0], out=out) is out
    check(case, out, [0, 3, 6], [6, 0])


def test_chunks_longer_than_a_tile_agree_across_backends():
    """300 queries over 700 tokens: several query tiles and KV segments of either twin."""
    case = make_case([700], heads=2, kv_heads=1, num_queries=300, dtype=torch.float16)
    states = [prefill(case, backend, [0, 300], [400]) for backend in ("torch", "triton")]
    outputs = [np.asarray(state.output().cpu().double()) for state in states]
    assert np.allclose(*outputs, atol=1e-3)
    for i in (0, 127, 128, 299):
        seen = i + 401
        k, v = case.keys[0][:seen], case.values[0][:seen]
        assert close(states[0].output()[i], reference_output(case.q[i], k, v, case.scale), torch.float16)


@pytest.mark.parametrize("offset", [0, 15, 16, 17, 40, -1])
def test_small_segments_of_the_torch_twin(monkeypatch, offset):
    """Tokens that all queries see, in segments, and the triangle behind them."""
    monkeypatch.setattr(torch_backend, "PREFILL_SEGMENT_TOKENS", 16)
    case = make_case([50], heads=2, kv_heads=1, num_queries=35)
    check(case, prefill(case, "torch", [0, 35], [offset]), [0, 35], [offset])


@pytest.mark.parametrize("is_triangle", [True, False])
def test_attention_of_a_span_without_the_cpu_kernel(is_triangle):
    """The torch twin on other devices: the same numbers from plain products."""
    q, k, v = (torch.randn(2, 3, 9, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    ours = torch_backend._attend(q, k, v, is_triangle, 0.25)
    plain = torch_backend._attend_plainly(q, k, v, is_triangle, 0.25)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
