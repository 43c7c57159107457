"""DistAttention, Ring attention and head-split attention over the in-process transport: time, and bytes on the wire.

All ranks share this one device, so the times compare work and copies, not links; the bytes are what a link would carry.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from infreal import rivals
from infreal.bench.contenders import BLOCK_TOKENS, random_tensor
from infreal.bench.profile import ProfileRow
from infreal.rivals import Exchange, Table
from infreal.transport.in_process import InProcessNetwork, InProcessTransport, run_ranks

if TYPE_CHECKING:
    from infreal.bench.attention import Bench

RANKS = 4  # as in the paper's Fig. 11
HEADS, HEAD_DIM = 40, 128  # LLaMA2-13B, as in the paper's Fig. 11
CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144)


def measure_rivals_on_the_wire(bench: "Bench") -> Iterator[ProfileRow]:
    """One row (request) of each context that fits, spread evenly over the ranks."""
    for context in CONTEXTS:
        if 2 * context * HEADS * HEAD_DIM * bench.options.dtype.itemsize > bench.options.kv_bytes / 4:
            break
        network = InProcessNetwork(RANKS)
        works = make_works(bench, context)
        sent = {name: _bytes_sent(network, work) for name, work in works.items()}
        calls = {name: lambda work=work, network=network: run_ranks(network, work) for name, work in works.items()}
        sizes = {"rows": 1, "context_tokens": context, "heads": HEADS, "kv_heads": HEADS, "head_dim": HEAD_DIM}
        for name, timing in bench.measure(calls).items():
            yield bench.row(name, timing, ranks=RANKS, link="in-process", num_bytes=sent[name], **sizes)


def _bytes_sent(network: InProcessNetwork, work: Callable[[InProcessTransport], Any]) -> int:
    """By all ranks together, in one call."""
    before = sum(sum(end.traffic.sent_bytes.values()) for end in network.endpoints)
    run_ranks(network, work)
    return sum(sum(end.traffic.sent_bytes.values()) for end in network.endpoints) - before


def make_works(bench: "Bench", context: int) -> dict[str, Callable[[InProcessTransport], Any]]:
    """What each rank does, by contender. Home is rank 0; every pool has the same number of bytes."""
    options = bench.options
    scale = HEAD_DIM**-0.5
    blocks = context // RANKS // BLOCK_TOKENS

    def new(*shape: int) -> torch.Tensor:
        return random_tensor(shape, options.dtype, options.device)

    def table(num_blocks: int) -> Table:
        ids = torch.arange(num_blocks, dtype=torch.int32, device=options.device).view(1, -1)
        return Table(ids, torch.full((1,), num_blocks * BLOCK_TOKENS, dtype=torch.int32, device=options.device))

    q = new(1, HEADS, HEAD_DIM)
    by_tokens = [new(blocks, 1, 2, BLOCK_TOKENS, HEADS, HEAD_DIM) for _ in range(RANKS)]
    by_heads = [pool.view(RANKS * blocks, 1, 2, BLOCK_TOKENS, HEADS // RANKS, HEAD_DIM) for pool in by_tokens]

    def exchange(transport: InProcessTransport) -> Exchange:
        return Exchange(transport, RANKS, options.backend, scale)

    def dist(transport: InProcessTransport) -> torch.Tensor | None:
        queries = q if transport.rank == 0 else torch.empty_like(q)
        return rivals.dist_attention(exchange(transport), 0, queries, by_tokens[transport.rank], table(blocks))

    def ring(transport: InProcessTransport) -> torch.Tensor:
        mine = slice(0, 1 if transport.rank == 0 else 0)
        tables = [table(blocks)] * RANKS
        return rivals.ring_attention(exchange(transport), q[mine], mine, by_tokens[transport.rank], tables)

    def tensor_parallel(transport: InProcessTransport) -> torch.Tensor | None:
        queries = q if transport.rank == 0 else torch.empty_like(q[:, : HEADS // RANKS])
        pool = by_heads[transport.rank]
        return rivals.tensor_parallel_attention(exchange(transport), 0, queries, pool, table(RANKS * blocks))

    return {"dist_attention": dist, "tensor_parallel_attention": tensor_parallel, "ring_attention": ring}
