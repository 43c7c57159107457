"""DistAttention, Ring attention and head-split attention: the same output as the reference, and their bytes on the wire."""

from dataclasses import dataclass

import pytest
import torch
from attention_reference import DEVICE, close, make_case, reference_output

from infreal import rivals
from infreal.kernels.partial import partial_bytes
from infreal.rivals import Exchange, Table, WireShape
from infreal.transport import DeadlineExceeded
from infreal.transport.in_process import InProcessNetwork, run_ranks

BLOCK_TOKENS = 16
# Rank threads share the process, and Triton's interpreter is not made for threads: Triton here means a GPU.
BACKEND = "triton" if DEVICE == "cuda" else "torch"


@dataclass
class Request:
    """Rows cut over ranks: keys, values `[tokens, kv_heads, head_dim]` per row; `lengths[rank][row]` tokens each."""

    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: list[list[int]]
    scale: float

    def expected(self, row: int):
        return reference_output(self.q[row], self.keys[row], self.values[row], self.scale)

    def pools(self) -> tuple[list[torch.Tensor], list[Table]]:
        """Each rank's pool of one layer, equally large, and its table."""
        size = max(sum(-(-n // BLOCK_TOKENS) for n in lengths) for lengths in self.lengths)
        starts = [0] * len(self.keys)
        pools, tables = [], []
        for lengths in self.lengths:
            pool = torch.full((size, 1, 2, BLOCK_TOKENS, *self.keys[0].shape[1:]), torch.nan, dtype=self.q.dtype)
            table = torch.zeros(len(lengths), size, dtype=torch.int32)
            free = iter(range(size))
            for row, length in enumerate(lengths):
                for i in range(length):
                    if i % BLOCK_TOKENS == 0:
                        table[row, i // BLOCK_TOKENS] = next(free)
                    block = table[row, i // BLOCK_TOKENS]
                    pool[block, 0, 0, i % BLOCK_TOKENS] = self.keys[row][starts[row] + i]
                    pool[block, 0, 1, i % BLOCK_TOKENS] = self.values[row][starts[row] + i]
                starts[row] += length
            pools.append(pool.to(DEVICE))
            tables.append(Table(table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)))
        return pools, tables


def make_request(lengths: list[list[int]], heads=8, kv_heads=4, head_dim=64, dtype=torch.float32) -> Request:
    totals = [sum(column) for column in zip(*lengths, strict=True)]
    case = make_case(totals, heads, kv_heads, head_dim, dtype)
    return Request(case.q, case.keys, case.values, lengths, case.scale)


def exchange(transport, num_ranks: int, request: Request) -> Exchange:
    return Exchange(transport, num_ranks, BACKEND, request.scale)


PLACEMENTS = [
    [[20, 5], [16, 40]],
    [[17, 0], [0, 33], [16, 16], [0, 0]],  # a creditor without a row, and one without any
    [[3, 1]],
]


@pytest.mark.parametrize("lengths", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dist_attention(lengths, dtype):
    request = make_request(lengths, dtype=dtype)
    pools, tables = request.pools()
    network, home = InProcessNetwork(len(lengths)), len(lengths) - 1

    def work(transport):
        rank = transport.rank
        q = request.q if rank == home else torch.empty_like(request.q)
        x = exchange(transport, len(lengths), request)
        return rivals.dist_attention(x, home, q, pools[rank], tables[rank])

    output = run_ranks(network, work)[home]
    for row in range(2):
        assert close(output[row], request.expected(row), dtype)
    shape = WireShape(2, 8, 4, 64, request.q.element_size())
    expected_bytes = rivals.dist_attention_bytes(shape, len(lengths) - 1)
    assert sum(sum(end.traffic.sent_bytes.values()) for end in network.endpoints) == expected_bytes


@pytest.mark.parametrize("lengths", PLACEMENTS)
def test_ring_attention_with_rows_at_home_on_different_ranks(lengths):
    request = make_request(lengths)
    pools, tables = request.pools()
    n = len(lengths)
    network = InProcessNetwork(n)
    rows = {0: slice(0, 2)} if n == 1 else {0: slice(0, 1), n - 1: slice(1, 2)}

    def work(transport):
        mine = rows.get(transport.rank, slice(0, 0))
        x = exchange(transport, n, request)
        return rivals.ring_attention(x, request.q[mine], mine, pools[transport.rank], tables)

    outputs = run_ranks(network, work)
    for rank, mine in rows.items():
        for i, row in enumerate(range(mine.start, mine.stop)):
            assert close(outputs[rank][i], request.expected(row))
    for end in network.endpoints:
        assert sum(end.traffic.sent_bytes.values()) == (n - 1) * pools[0].nbytes


@pytest.mark.parametrize("n", [1, 2, 4])
def test_tensor_parallel_attention(n):
    request = make_request([[40, 7]])
    pools, tables = request.pools()
    network = InProcessNetwork(n)

    def work(transport):
        heads = slice(4 // n * transport.rank, 4 // n * (transport.rank + 1))
        q = request.q if transport.rank == 0 else torch.empty(2, 8 // n, 64, device=DEVICE)
        x = exchange(transport, n, request)
        return rivals.tensor_parallel_attention(x, 0, q, pools[0][:, :, :, :, heads].contiguous(), tables[0])

    output = run_ranks(network, work)[0]
    for row in range(2):
        assert close(output[row], request.expected(row))
    sent = sum(sum(end.traffic.sent_bytes.values()) for end in network.endpoints)
    assert sent == rivals.tensor_parallel_bytes(WireShape(2, 8, 4, 64, 4), n)


def test_a_creditor_that_does_not_answer_ends_the_step_by_its_deadline():
    request = make_request([[20, 5], [16, 40]])
    pools, tables = request.pools()
    home = InProcessNetwork(2).endpoints[0]
    x = Exchange(home, 2, BACKEND, request.scale, timeout_s=0.05)
    with pytest.raises(DeadlineExceeded, match="rank 0, peer 1"):
        rivals.dist_attention(x, 0, request.q, pools[0], tables[0])


def test_bytes_of_one_decode_row_and_layer_at_13b_dimensions():
    """One query out and one partial back (fp16, 40 heads of 128) against the KV that Ring would ship."""
    shape = WireShape(rows=1, heads=40, kv_heads=40, head_dim=128, element_bytes=2)
    assert shape.query_bytes() == 40 * 128 * 2 == 10_240
    assert partial_bytes(1, 40, 128) == 40 * (128 + 2) * 4 == 20_800
    assert rivals.dist_attention_bytes(shape, creditors=1) == 31_040
    assert rivals.dist_attention_bytes(shape, creditors=3) == 93_120
    assert shape.kv_bytes(1) == 819_200 // 40, "a layer of the paper's 819,200 bytes per token"
    ring = rivals.ring_attention_bytes(shape, tokens=128 * 1024, num_ranks=4)
    assert ring == 3 * 32 * 1024 * 20_480
    assert ring / rivals.dist_attention_bytes(shape, creditors=3) > 20_000
