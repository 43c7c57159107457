"""Prices of commands: how long a step takes under a cost model (design.md §3), and what it costs others.

What others do enters as it was last published, in macro steps and single iterations alike; no fixed point is sought.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perfmodel.borrowing import exchange_s, remote_layer_s, residual_s
from perfmodel.cost import CostModel
from perfmodel.messages import StartIterations
from perfmodel.specs import LinkSpec
from perfmodel.steptime import Bend, Line, StepTime
from perfmodel.view import RemoteRead

MAX_SERVED_SHARE = 0.9  # an instance that serves others more than this has its own work served first
# of a creditor's time, for the queries of one prompt: its own iterations get at most 1.5 times as long
CHUNK_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an instance's step depends on outside it, as last published.

    share: of its time, taken by MicroAttention and copies for others · link(peer) · iteration_s(peer): of that instance.
    """

    share: float
    link: Callable[[int], LinkSpec]
    iteration_s: Callable[[int], float]


class StepPrice(NamedTuple):
    """`time`: when the iterations end; `alone`: were nothing waited for elsewhere (the difference is remote wait).

    Of each iteration: its new tokens, its kernels besides attention (were nothing served) and the host's part.
    """

    time: StepTime
    alone: StepTime
    tokens: int
    kernel_s: float
    host_s: float


def price_step(
    cost: CostModel, step: StartIterations, around: Surroundings, iterations: int | None = None
) -> StepPrice:
    """Prices the first `iterations` of a step (None: all).

    Iteration j = max(launches, kernels + max(local attention(j), remote attention)) + host, stretched by what is served.

    Local decode attention grows with j; what is on other instances does not.
    """
    rows = new_tokens = logits_rows = step.decode_rows
    prefill_s = 0.0
    for chunk in step.chunks:
        new_tokens += chunk.tokens
        logits_rows += chunk.last
        prefill_s += cost.prefill_attention_s(chunk.tokens, chunk.prefix_tokens - chunk.remote_tokens)
    own_kernel_s, launch_s, host_s = cost.iteration_terms(new_tokens, rows, logits_rows)
    launch_s += exchange_launches_s(cost, step)
    terms = cost.decode_attention_terms(rows)
    stretch = 1 / (1 - min(around.share + cost.instance.engine.background_frac, MAX_SERVED_SHARE))
    kernel_s = own_kernel_s * stretch
    lines = [(max(kernel_s + (prefill_s + terms.floor_s) * stretch, launch_s), 0.0)]
    bends: list[Bend] = []
    growing = [(terms, rows, step.decode_context_tokens)] if rows else []
    if rows > 1:  # a batch takes at least as long as its longest row alone, whose KV few rows read more slowly
        growing.append((cost.decode_attention_terms(1), 1, step.longest_tokens))
    for of, per_iteration, tokens in growing:
        early, late = (
            (kernel_s + (prefill_s + line_s + slope * tokens) * stretch, slope * per_iteration * stretch)
            for line_s, slope in ((of.early_s, of.early_s_per_token), (of.base_s, of.s_per_token))
        )
        if early[0] < late[0]:
            bends.append((early, late))
        else:
            lines.append(late)
    limit = iterations or step.max_iterations
    alone = step_time(limit, host_s, lines, bends)
    if not step.remote and not step.chunk_remote:
        return StepPrice(alone, alone, new_tokens, own_kernel_s, host_s)
    remote_s = cost.instance.model.num_layers * (
        _decode_layer_s(cost, step.remote, around) + _chunk_layer_s(cost, step.chunk_remote, around)
    )
    time = step_time(limit, host_s, [*lines, (kernel_s + remote_s, 0.0)], bends)
    return StepPrice(time, alone, new_tokens, own_kernel_s, host_s)


def step_time(iterations: int, host_s: float, lines: Sequence[Line], bends: Sequence[Bend]) -> StepTime:
    """A single iteration needs no envelope: the highest line at its start."""
    if iterations > 1:
        return StepTime(host_s, lines, bends, iterations)
    first_s = max([intercept for intercept, _ in lines] + [min(early[0], late[0]) for early, late in bends])
    return StepTime(host_s, [(first_s, 0.0)])


def exchange_launches_s(cost: CostModel, step: StartIterations) -> float:
    """Launches that queries to other instances add, per layer and peer."""
    if not step.remote and not step.chunk_remote:
        return 0.0
    peers = len({read.peer for read in step.remote + step.chunk_remote})
    overhead_s = cost.instance.engine.exchange_s_per_layer_per_peer * cost.scale["host"]
    return peers * overhead_s * cost.instance.model.num_layers


def _decode_layer_s(cost: CostModel, remote: tuple[RemoteRead, ...], around: Surroundings) -> float:
    """The slowest creditor of one layer; the launches for the others come before it."""
    if not remote:
        return 0.0
    slowest = max(
        remote_layer_s(cost, around.link(r.peer), r.rows, r.tokens, around.iteration_s(r.peer)) for r in remote
    )
    return slowest + (len(remote) - 1) * cost.instance.engine.exchange_s_per_layer_per_peer * cost.scale["host"]


def _chunk_layer_s(cost: CostModel, remote: tuple[RemoteRead, ...], around: Surroundings) -> float:
    """One layer of a chunk's queries at all creditors: sliced, so that sending, computing and receiving overlap.

    The queries to all creditors share the way out, the partial states the way in; the slower of the wires and of the creditors
    decides, and the first slice's exchange comes on top. A creditor that runs requests of its own serves slice by slice between
    its own kernels, so that its decode rows do not stall.
    """
    if not remote:
        return 0.0
    layers = cost.instance.model.num_layers
    wires_s = [exchange_s(cost, around.link(r.peer), r.rows) - 2 * around.link(r.peer).latency_s for r in remote]
    compute_s = 0.0
    for r in remote:
        busy_s = around.iteration_s(r.peer)
        ma_s = cost.prefill_micro_attention_s(r.rows, r.tokens) / layers
        compute_s = max(compute_s, ma_s / (CHUNK_SHARE if busy_s else 1.0) + residual_s(cost, busy_s))
    return max(sum(wires_s, 0.0), compute_s) + 2 * max(around.link(r.peer).latency_s for r in remote)


def served_s(cost: CostModel, step: StartIterations, creditor: int) -> float:
    """MicroAttention that one iteration of the step costs a creditor."""
    decode_s = [cost.micro_attention_s(r.rows, r.tokens) for r in step.remote if r.peer == creditor]
    chunk_s = [cost.prefill_micro_attention_s(r.rows, r.tokens) for r in step.chunk_remote if r.peer == creditor]
    return sum(decode_s, 0.0) + sum(chunk_s, 0.0)
