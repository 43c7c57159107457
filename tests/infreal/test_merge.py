"""Merge: S1, S9, and the algebra (any partition, order and nesting), against the fp64 reference."""

import numpy as np
import pytest
import torch
from attention_reference import DEVICE, close, make_case, reference_output
from hypothesis import given, settings
from hypothesis import strategies as st

from infreal.kernels import Partial, merge, micro_attention
from infreal.kernels.partial import packed_numel, partial_bytes


def random_state(*shape: int, seed: int = 0) -> Partial:
    generator = torch.Generator().manual_seed(seed)
    acc, m, e = torch.randn(shape, generator=generator), *torch.randn(2, *shape[:-1], generator=generator)
    return Partial(acc.to(DEVICE), (5 * m).to(DEVICE), e.abs().to(DEVICE) + 1)


def empty_state(*shape: int) -> Partial:
    """A part without tokens whose acc and e were never written."""
    state = Partial.empty(shape, DEVICE)
    state.acc.fill_(torch.nan)
    state.e.fill_(torch.nan)
    state.m.fill_(-torch.inf)
    return state


def same(a: Partial, b: Partial) -> bool:
    return torch.equal(a.acc, b.acc) and torch.equal(a.m, b.m) and torch.equal(a.e, b.e)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_s1_empty_parts_merge_to_the_neutral_element(backend, k):
    empties = [empty_state(3, 4, 80) for _ in range(k)]
    merged = merge(empties, backend=backend)
    assert same(merged, Partial.neutral((3, 4, 80), DEVICE))
    assert (merged.output() == 0).all()
    real = random_state(3, 4, 80)
    for parts in ([merged, real], [real, merged], [*empties, real], [real, *empties]):
        assert same(merge(parts, backend=backend), real), "a real part comes back bit for bit, in any order"


def test_no_part_at_all_is_the_neutral_element(backend):
    none = Partial(*(torch.empty(0, *shape, device=DEVICE) for shape in ((2, 3, 64), (2, 3), (2, 3))))
    assert same(merge(none, backend=backend), Partial.neutral((2, 3, 64), DEVICE))


def test_some_rows_empty_in_some_parts(backend):
    parts = [random_state(4, 2, 64, seed=i) for i in range(3)]
    for i, row in ((0, 0), (1, 0), (2, 0), (1, 1), (2, 3)):
        parts[i].m[row] = -torch.inf
        parts[i].acc[row] = torch.nan
        parts[i].e[row] = torch.nan
    merged = merge(parts, backend=backend)
    assert (merged.m[0] == -torch.inf).all() and (merged.acc[0] == 0).all() and (merged.e[0] == 0).all()
    rest = merge([Partial(p.acc[1:2], p.m[1:2], p.e[1:2]) for p in (parts[0], parts[2])], backend=backend)
    assert torch.allclose(merged.acc[1:2], rest.acc) and torch.equal(merged.m[1:2], rest.m)
    assert torch.isfinite(merged.output()).all()


def test_the_formula(backend):
    parts = [random_state(5, 3, 128, seed=i) for i in range(8)]
    acc, m, e = (torch.stack([getattr(p, name) for p in parts]).double().cpu().numpy() for name in ("acc", "m", "e"))
    weight = np.exp(m - m.max(0))
    merged = merge(parts, backend=backend)
    assert close(merged.m, m.max(0))
    assert close(merged.e, (e * weight).sum(0))
    assert close(merged.acc, (acc * weight[..., None]).sum(0))


def test_scores_of_any_size_do_not_overflow(backend):
    a, b = random_state(1, 1, 64), random_state(1, 1, 64, seed=1)
    b.m[:] = a.m + 1e4
    assert same(merge([a, b], backend=backend), b)


def test_many_parts(backend):
    """More than one tile of parts, as a long row's splits are."""
    parts = random_state(70, 1, 2, 64)
    weight = torch.exp(parts.m - parts.m.amax(0))
    merged = merge(parts, backend=backend)
    assert torch.allclose(merged.e, (parts.e * weight).sum(0), rtol=1e-5)
    assert torch.allclose(merged.acc, (parts.acc * weight[..., None]).sum(0), rtol=1e-5, atol=1e-5)


def test_messages_are_merged_in_the_slots_they_were_received_in(backend):
    rows, heads, head_dim = 2, 3, 80
    buffer = torch.full((4, packed_numel(rows, heads, head_dim)), torch.nan, device=DEVICE)
    slots = Partial.packed(buffer, rows, heads, head_dim)
    parts = [random_state(rows, heads, head_dim, seed=i) for i in range(4)]
    for i, part in enumerate(parts):
        message = torch.cat([part.acc.flatten(), part.m.flatten(), part.e.flatten()])
        assert message.numel() * message.element_size() == partial_bytes(rows, heads, head_dim)
        buffer[i] = message
    assert same(merge(slots, backend=backend), merge(parts, backend=backend))


def test_out_is_filled_completely(backend):
    out = empty_state(2, 2, 64)
    assert merge([random_state(2, 2, 64), random_state(2, 2, 64, seed=1)], backend=backend, out=out) is out
    assert torch.isfinite(out.acc).all() and torch.isfinite(out.e).all() and torch.isfinite(out.m).all()


def test_merging_in_groups_is_merging_at_once(backend):
    parts = [random_state(2, 3, 64, seed=i) for i in range(5)]
    at_once = merge(parts, backend=backend)
    inner = merge(parts[1:3], backend=backend)
    nested = merge(
        [merge([parts[4], inner], backend=backend), merge([parts[3], parts[0]], backend=backend)], backend=backend
    )
    assert torch.allclose(nested.output(), at_once.output(), rtol=1e-5, atol=1e-6)


@st.composite
def partitions(draw, max_blocks: int, max_parts: int):
    """(tokens of the request, instance of each block): the last block may be partly filled; instances may be empty."""
    blocks = draw(st.integers(1, max_blocks))
    tokens = (blocks - 1) * 16 + draw(st.integers(1, 16))
    owners = draw(st.lists(st.integers(0, max_parts - 1), min_size=blocks, max_size=blocks))
    return tokens, owners


def part_of(case, owners: list[int], instance: int, backend: str) -> Partial:
    """MicroAttention over the blocks that this instance holds. Only the request's last block may be unsealed."""
    held = [i for i, owner in enumerate(owners) if owner == instance]
    total = int(case.num_tokens[0])
    tokens = sum(min(16, total - 16 * i) for i in held)
    table = case.block_table[:, held] if held else case.block_table[:, :0]
    lengths = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
    return micro_attention(
        case.q, case.kv_pool, table.contiguous(), lengths, layer=1, scale=case.scale, backend=backend
    )


def merged_in_some_order(parts: list[Partial], random, backend: str) -> Partial:
    """Merges random groups of states until one is left: any order, any nesting."""
    parts = list(parts)
    while len(parts) > 1:
        random.shuffle(parts)
        size = random.randint(2, len(parts))
        parts = [merge(parts[:size], backend=backend), *parts[size:]]
    return parts[0]


def check_partition(partition, random, backend: str, max_parts: int) -> None:
    tokens, owners = partition
    case = make_case([tokens], heads=4, kv_heads=2, head_dim=64, seed=tokens)
    parts = [part_of(case, owners, instance, backend) for instance in range(max_parts)]
    whole = reference_output(case.q[0], case.keys[0], case.values[0], case.scale)
    assert close(merged_in_some_order(parts, random, backend).output()[0], whole)


@settings(max_examples=25, deadline=None)
@given(partitions(max_blocks=9, max_parts=8), st.randoms(use_true_random=False))
def test_s9_any_partition_order_and_nesting_equals_full_attention(partition, random):
    check_partition(partition, random, "torch", 8)


@settings(max_examples=4, deadline=None)
@given(partitions(max_blocks=5, max_parts=3), st.randoms(use_true_random=False))
def test_s9_on_triton(partition, random):
    check_partition(partition, random, "triton", 3)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(partitions(max_blocks=70, max_parts=8), st.randoms(use_true_random=False))
def test_s9_over_long_requests(partition, random):
    check_partition(partition, random, "torch", 8)
