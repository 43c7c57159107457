"""Wrong arguments raise ValueError that names the argument, on both backends alike."""

import pytest
import torch
from attention_reference import DEVICE, make_case

from infreal.kernels import Partial, merge, micro_attention, prefill_micro_attention, write_kv


def decode(**changes):
    case = make_case([3, 20])
    args = {
        "q": case.q,
        "kv_pool": case.kv_pool,
        "block_table": case.block_table,
        "num_local_tokens": case.num_tokens,
        "layer": 1,
        "scale": 0.1,
        "backend": "torch",
    }
    return micro_attention(
        **{name: change(args[name]) if callable(change) else change for name, change in (args | changes).items()}
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "cuda"}, "backend 'cuda' is not one of torch, triton"),
        ({"layer": 2}, r"layer 2 is outside 0\.\.1"),
        ({"q": lambda q: q.half()}, "q is torch.float16; the pool is torch.float32"),
        ({"q": lambda q: q[:, :7]}, "multiple of 2 heads"),
        ({"q": lambda q: q[..., :32]}, "q .* must be"),
        ({"kv_pool": lambda pool: pool[:, 0]}, "kv_pool must be contiguous"),
        ({"kv_pool": lambda pool: pool.double()}, "kv_pool is torch.float64"),
        ({"kv_pool": lambda pool: pool.transpose(3, 4)}, "kv_pool must be contiguous"),
        ({"block_table": lambda table: table.long()}, "block_table must be dense torch.int32"),
        ({"block_table": lambda table: table[:1]}, "block_table has shape"),
        ({"num_local_tokens": lambda n: n[:1]}, "num_local_tokens has shape"),
        ({"out": Partial.empty((2, 8, 80), DEVICE)}, "out.acc has shape"),
        ({"out": Partial(*(t.half() for t in (torch.ones(2, 8, 64), *torch.ones(2, 2, 8))))}, "contiguous float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_decode_names_what_is_wrong(changes, words):
    with pytest.raises(ValueError, match=words):
        decode(**changes)


def test_prefill_checks_its_rows():
    case = make_case([3, 20])
    with pytest.raises(ValueError, match="query_start has shape"):
        prefill_micro_attention(
            case.q, case.num_tokens, case.kv_pool, case.block_table, case.num_tokens, None,
            layer=0, scale=1.0, backend="torch",
        )  # fmt: skip


def test_merge_checks_its_parts(backend):
    state = Partial.neutral((2, 3, 64), DEVICE)
    with pytest.raises(ValueError, match="dense within a part"):
        merge(Partial(state.acc.transpose(0, 1)[None], state.m.t()[None], state.e.t()[None]), backend=backend)
    with pytest.raises(ValueError, match="do not match"):
        merge(Partial(state.acc[None], state.m[None, :1], state.e[None]), backend=backend)
    with pytest.raises(ValueError, match="no parts to stack"):
        merge([], backend=backend)


def test_write_kv_checks_what_it_writes(backend):
    pool = torch.zeros(1, 1, 2, 16, 2, 64, device=DEVICE)
    slots = torch.tensor([3], device=DEVICE)
    new = torch.ones(1, 2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="k has shape"):
        write_kv(new[:, :1], new, pool, slots, layer=0, backend=backend)
    with pytest.raises(ValueError, match="the pool is"):
        write_kv(new.half(), new.half(), pool, slots, layer=0, backend=backend)
