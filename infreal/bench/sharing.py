"""What DistAttention costs: decode iterations with a share of the KV on other instances, against all of it at home.

All instances are in this process and take turns, so the remote MicroAttention is part of the time: what is left over the all-local
iteration is the exchange, smaller matrix products and the merge. Beside machines of their own, creditors would work meanwhile.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from infreal.bench.timing import Timing, measure
from infreal.dist_attention import ANSWER, QUERY, DistAttention, Query, RemotePart, Serving, tag_of
from infreal.kernels.partial import packed_numel
from infreal.model import Decoder, Row, make_batch
from infreal.transport.in_process import CooperativeTransport, InProcessNetwork

BLOCK_TOKENS = 16
# what lies elsewhere: a share of the KV at each creditor
CASES: dict[str, tuple[Fraction, ...]] = {
    "all at home": (),
    "1/2 at one creditor": (Fraction(1, 2),),
    "3/4 at one creditor": (Fraction(3, 4),),
    "3/4 at three creditors": (Fraction(1, 4),) * 3,
}


@dataclass
class Debtor:
    """`rows` requests of `context_tokens` tokens whose KV is spread as `shares` says; `iterate()` decodes a token of each."""

    decoder: Decoder
    rows: int
    context_tokens: int
    shares: Sequence[Fraction]
    backend: str

    def __post_init__(self) -> None:
        blocks = self.context_tokens // BLOCK_TOKENS
        counts = [int(share * blocks) for share in self.shares]
        here = blocks - sum(counts) + 1
        network = InProcessNetwork(1 + len(counts))
        self.transport = CooperativeTransport(network, 0, self._serve)
        self._creditors = network.endpoints
        self.pool = self._fill(self.rows * here)
        tables = [range(i * here, (i + 1) * here) for i in range(self.rows)]
        position, local = blocks * BLOCK_TOKENS, (here - 1) * BLOCK_TOKENS + 1
        device = self.decoder.device
        self.batch = make_batch([Row([1], position, table, local) for table in tables], BLOCK_TOKENS, device)
        index = torch.arange(self.rows, device=device)
        self.parts = [RemotePart(peer, 0, index) for peer in range(1, 1 + len(counts))]
        self.servings = [
            Serving(self._fill(self.rows * n), [1] * self.rows, [range(i * n, (i + 1) * n) for i in range(self.rows)])
            for n in counts
        ]
        self._layers = [0] * len(counts)

    def _fill(self, num_blocks: int) -> torch.Tensor:
        return self.decoder.new_pool(num_blocks, BLOCK_TOKENS).normal_()

    def _serve(self, _: int, creditor: int) -> None:
        config, i = self.decoder.config, creditor - 1
        endpoint = self._creditors[creditor]
        query = Query(self.rows, config.num_heads, config.head_dim, self.pool)
        endpoint.wait(endpoint.post_recv(0, tag_of(QUERY, 0), query.message), time.monotonic() + 10)
        answer = self.servings[i].answer(self._layers[i], query.q, config.scale, self.backend)
        endpoint.send(0, tag_of(ANSWER, 0), answer)
        self._layers[i] = (self._layers[i] + 1) % config.num_layers

    def iterate(self) -> torch.Tensor:
        local = self.decoder.local_attention(self.batch, self.pool, self.backend)
        if not self.parts:
            return self.decoder.forward(self.batch, local)
        return self.decoder.forward(self.batch, DistAttention(local, self.parts, self.transport, time.monotonic, 10.0))

    @property
    def bytes_per_layer(self) -> int:
        """Queries out and partial states back, over all creditors."""
        config = self.decoder.config
        query = self.rows * config.num_heads * config.head_dim * self.decoder.dtype.itemsize
        return len(self.parts) * (query + 4 * packed_numel(self.rows, config.num_heads, config.head_dim))


def measure_sharing(decoder: Decoder, rows: int, context_tokens: int, backend: str) -> dict[str, tuple[Timing, int]]:
    """Time of an iteration and bytes on the wire per layer, for each case."""
    debtors = {name: Debtor(decoder, rows, context_tokens, shares, backend) for name, shares in CASES.items()}
    calls: dict[str, Callable[[], object]] = {name: debtor.iterate for name, debtor in debtors.items()}
    timings = measure(calls, decoder.device.type)
    return {name: (timings[name], debtors[name].bytes_per_layer) for name in CASES}


def report(found: dict[str, tuple[Timing, int]], num_layers: int) -> str:
    alone_s = found["all at home"][0].median_s
    lines = [f"{'KV elsewhere':<24} {'iteration':>12} {'more':>7} {'more a layer':>13} {'wire a layer':>13}"]
    for name, (timing, num_bytes) in found.items():
        more_s = timing.median_s - alone_s
        lines.append(
            f"{name:<24} {timing.median_s * 1e3:>9.2f} ms {100 * more_s / alone_s:>5.0f} % {more_s / num_layers * 1e6:>10.0f} µs "
            f"{num_bytes / 1e3:>10.1f} KB"
        )
    return "\n".join(lines)
