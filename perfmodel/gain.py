"""What a move is worth under belief: tokens per second that lending k blocks adds, at the debtor and at the creditor.

TPS of an instance = rows / iteration, iteration = max(kernels + attention, launches) + host (paper.md §4, with the host of
simulators.md). With k blocks lent,

- the debtor's batch is β′(k): its rows and the waiting prompts that fit, first come first served, at prompt + 1 tokens, into
  free + pledged + k blocks less headroom. Its attention is the longest of local attention (the k blocks no longer read, the
  admitted prompts read) and the waits for each creditor, this one included (perfmodel.borrowing);
- the creditor's batch is β_c(k), its own prompts losing the k blocks. The MA it serves takes a share of its time, MA / period
  of the debtor (design.md §3): its iterations get as much longer as it serves meanwhile. In the paper's
  T_creditor = T_lyr + K/g both iterate at the same pace.

**Where the best k lies.** Between breakpoints β′ and β_c are constant, the debtor's iteration is one of the lines under its
max(…), hence a + b·k, and the MA served is affine in k. So TPS is β′/(a + b·k) + c · max(0, 1 − d − e·k) there: convex, and its
maximum lies on an end. Breakpoints are k = 0, 1 and block_max, every admission at the debtor and every shrink of the creditor
(both sides of the step), and every crossing of two lines under the max(…) of an iteration or of MA (both neighbouring
integers). All are evaluated at once, as arrays.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from perfmodel.borrowing import exchange_s, residual_s
from perfmodel.specs import LinkSpec
from perfmodel.view import ClusterView, Load, RemoteRead, read_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Numbers = Floats | Ints | float


class Offer(NamedTuple):
    """The best number of blocks to lend, and the tokens/s that this adds (0, 0: nothing is better)."""

    num_blocks: int
    gain_tok_per_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Decode iterations of an instance by a = 0 … A, the waiting prompts admitted: arrays of A + 1, `need_blocks` of A.

    need_blocks[a]: free blocks, those kept back included, from which prompt a is in too. Attention as in
    `CostModel.decode_attention_terms`. Moves change none of this.
    """

    need_blocks: Ints
    prompt_tokens: Floats
    rows: Floats
    kernel_s: Floats
    launch_s: Floats
    host_s: Floats
    floor_s: Floats
    base_s: Floats
    s_per_token: Floats


def decode_terms(load: Load, block_tokens: int, times: Callable[[int], tuple[float, ...]]) -> Terms:
    """Terms of an instance, up to the prompts that can be in once its longest request has left. `times(rows)`: the six of a
    batch, in the order of the fields."""
    prompts = np.array(load.waiting, dtype=np.int64)
    need = np.cumsum(prompts // block_tokens + 1) + load.headroom_blocks
    need[:1] += load.kept_blocks - load.headroom_blocks
    movable = max((request.movable_blocks for request in load.longest), default=0)
    count = int(np.searchsorted(need, load.free_blocks + load.pledged_blocks + movable, "right"))
    rows = range(load.batch, load.batch + count + 1)
    tokens = np.concatenate(([0.0], np.cumsum(prompts[:count] + 1)))
    return Terms(need[:count], tokens, np.array(rows, dtype=np.float64), *np.array([times(n) for n in rows]).T)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """An instance before the move. wait_s: the longest of its waits that the move does not change, all layers; served_share:
    the share of its time that MA for others takes, this pair's left out."""

    terms: Terms
    free_blocks: int  # pledged ones included
    context_tokens: int
    wait_s: float
    served_share: float

    def tok_per_s(self, freed_blocks: Ints, read_tokens: Numbers, wait_s: Numbers, share: Numbers) -> Floats:
        """TPS with `freed_blocks` more blocks, while a layer's reads are `read_tokens` tokens of its present batch."""
        terms = self.terms
        a = np.searchsorted(terms.need_blocks, self.free_blocks + freed_blocks, "right")
        context_tokens = np.maximum(read_tokens + terms.prompt_tokens[a], 0.0)
        local_s = np.maximum(terms.floor_s[a], terms.base_s[a] + terms.s_per_token[a] * context_tokens)
        kernel_s = terms.kernel_s[a] + np.maximum(local_s, wait_s)
        iteration_s = np.maximum(kernel_s, terms.launch_s[a]) + terms.host_s[a]
        return terms.rows[a] / np.maximum(iteration_s, 1e-12) * np.maximum(1.0 - share, 0.0)


@dataclass(frozen=True, slots=True)
class Serving:
    """MA of a debtor on a creditor, all layers, before the move and with k > 0 blocks moved.

    With k blocks: MA = max(floor_s, base_s + block_s · k); the debtor waits exchange_s more.
    """

    before_ma_s: float
    before_wait_s: float
    exchange_s: float
    floor_s: float
    base_s: float
    block_s: float

    def ma_s(self, blocks: Ints) -> Floats:
        moved = np.maximum(self.floor_s, self.base_s + self.block_s * blocks)
        return np.where(blocks > 0, moved, self.before_ma_s)

    def wait_s(self, blocks: Ints) -> Floats:
        moved = self.exchange_s + np.maximum(self.floor_s, self.base_s + self.block_s * blocks)
        return np.where(blocks > 0, moved, self.before_wait_s)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A debtor that may lend blocks to a creditor."""

    block_tokens: int
    debtor: Side
    creditor: Side
    serving: Serving
    period_s: float  # of the debtor's iterations

    def tok_per_s(self, blocks: Ints) -> Floats:
        """TPS of both instances with `blocks` blocks moved."""
        debtor, creditor, serving = self.debtor, self.creditor, self.serving
        kept_tokens = debtor.context_tokens - self.block_tokens * blocks
        wait_s = np.maximum(serving.wait_s(blocks), debtor.wait_s)
        share = creditor.served_share + serving.ma_s(blocks) / self.period_s
        borrowing = debtor.tok_per_s(blocks, kept_tokens, wait_s, debtor.served_share)
        return borrowing + creditor.tok_per_s(-blocks, creditor.context_tokens, creditor.wait_s, share)

    def best(self, block_max: int) -> Offer:
        """The k in 0 … block_max with the highest gain, the smallest of equals. The debtor decodes where block_max > 0."""
        if block_max < 1:
            return Offer(0, 0.0)
        blocks = self._breakpoints(block_max)
        tok_per_s = self.tok_per_s(blocks)
        i = int(np.argmax(tok_per_s))
        return Offer(int(blocks[i]), float(tok_per_s[i] - tok_per_s[0]))

    def _breakpoints(self, block_max: int) -> Ints:
        """Sorted, from 0 to block_max."""
        crossings = np.floor(np.clip(self._crossings(), 0, block_max))
        admissions = self.debtor.terms.need_blocks - self.debtor.free_blocks
        shrinks = self.creditor.free_blocks - self.creditor.terms.need_blocks
        steps = (crossings, crossings + 1, admissions - 1, admissions, shrinks, shrinks + 1, (0, 1, block_max))
        return np.sort(np.clip(np.concatenate(steps), 0, block_max)).astype(np.int64)

    def _crossings(self) -> Floats:
        """k where two lines under the debtor's max(…) meet, whatever the admissions: one that falls (local attention), one that
        rises (this creditor's MA), and the highest of those that do not change. And where MA leaves its floor."""
        terms, serving, wait_s = self.debtor.terms, self.serving, self.debtor.wait_s
        level = np.maximum(terms.launch_s - terms.kernel_s, np.maximum(terms.floor_s, terms.base_s))
        level = np.maximum(level, max(wait_s, serving.exchange_s + serving.floor_s))
        falling = terms.base_s + terms.s_per_token * (self.debtor.context_tokens + terms.prompt_tokens)
        fall = terms.s_per_token * self.block_tokens
        rising = serving.exchange_s + serving.base_s
        return np.concatenate(
            (
                (falling - level) / fall,
                (level - rising) / serving.block_s,
                (falling - rising) / (fall + serving.block_s),
                [(serving.floor_s - serving.base_s) / serving.block_s],
            )
        )


class Pricer:
    """Prices the pairs of a plan. `loads` are those of the plan in the making: they may change between calls."""

    def __init__(self, view: ClusterView, loads: Mapping[int, Load]) -> None:
        self._view, self._loads, self._cost = view, loads, view.belief
        self._terms: dict[int, Terms] = {}
        self._batches: dict[int, tuple[float, ...]] = {}
        self._exchanges: dict[tuple[LinkSpec, int], float] = {}
        layers = self._cost.instance.model.num_layers
        self._residuals = {
            i: 0.0 if load.idle else layers * residual_s(self._cost, load.iteration_s) for i, load in loads.items()
        }

    def spare_s(self, debtor: int) -> float:
        """What may go by before a creditor begins with a first block, so that the debtor need not wait for it; all layers.

        A creditor whose `exchange_s` is longer can hide nothing: a quick look, before a pair is priced.
        """
        load, block_tokens = self._loads[debtor], self._view.block_tokens
        local_s = self._cost.decode_attention_s(load.batch, max(0, load.context_tokens - block_tokens))
        return local_s - self._cost.micro_attention_s(1, block_tokens)

    def exchange_s(self, debtor: int, creditor: int, rows: int = 1) -> float:
        """What a debtor waits for besides MA, all layers. An idle creditor keeps no query waiting."""
        key = (self._view.link(debtor, creditor), rows)
        wire_s = self._exchanges.get(key)
        if wire_s is None:
            wire_s = self._cost.instance.model.num_layers * exchange_s(self._cost, *key)
            self._exchanges[key] = wire_s
        return wire_s + self._residuals[creditor]

    def pair(self, debtor: int, creditor: int, serving: Serving) -> Pair:
        period_s = self._period_s(debtor)
        sides = self._side(debtor, creditor), self._side(creditor, debtor)
        return Pair(self._view.block_tokens, *sides, serving, period_s)

    def serving(self, debtor: int, creditor: int) -> Serving:
        """One more row of the debtor reads on the creditor, beside those that do already."""
        cost, load = self._cost, self._loads[debtor]
        before = read_of(load.remote, creditor)
        rows = before.one_more_row(0, max(1, load.batch)).rows
        floor_s, base_s, s_per_token = cost.micro_attention_terms(rows)
        return Serving(
            before_ma_s=cost.micro_attention_s(before.rows, before.tokens),
            before_wait_s=self._wait_s(debtor, before),
            exchange_s=self.exchange_s(debtor, creditor, rows),
            floor_s=floor_s,
            base_s=base_s + s_per_token * before.tokens,
            block_s=s_per_token * self._view.block_tokens,
        )

    def hidden_blocks(self, debtor: int, serving: Serving, limit: int) -> int:
        """Blocks, at most `limit`, up to which the debtor's layers need not wait for this creditor: exchange + MA + residual is
        within the local attention left after the move, before anything is admitted into the room."""
        load, block_tokens = self._loads[debtor], self._view.block_tokens
        floor_s, base_s, s_per_token = self._cost.decode_attention_terms(load.batch)

        def waits(blocks: int) -> bool:
            context_tokens = max(0, load.context_tokens - block_tokens * blocks)
            local_s = max(floor_s, base_s + s_per_token * context_tokens)
            return serving.exchange_s + max(serving.floor_s, serving.base_s + serving.block_s * blocks) > local_s

        return 0 if limit < 1 or waits(1) else bisect_left(range(1, limit + 1), True, key=waits)

    def _side(self, instance: int, peer: int) -> Side:
        load = self._loads[instance]
        if instance not in self._terms:
            self._terms[instance] = decode_terms(load, self._view.block_tokens, self._times)
        return Side(
            terms=self._terms[instance],
            free_blocks=load.free_blocks + load.pledged_blocks,
            context_tokens=load.context_tokens,
            wait_s=max((self._wait_s(instance, read) for read in load.remote if read.peer != peer), default=0.0),
            served_share=sum(self._share(read) for read in load.served if read.peer != peer),
        )

    def _times(self, rows: int) -> tuple[float, ...]:
        found = self._batches.get(rows)
        if found is None:
            attention = self._cost.decode_attention_terms(rows)
            found = self._batches[rows] = (*self._cost.iteration_terms(rows, rows, rows), *attention)
        return found

    def _wait_s(self, debtor: int, read: RemoteRead) -> float:
        """From sending the queries of a read until its partial states are back, all layers (0: the peer is gone)."""
        if not read.rows or read.peer not in self._loads:
            return 0.0
        return self.exchange_s(debtor, read.peer, read.rows) + self._cost.micro_attention_s(read.rows, read.tokens)

    def _share(self, read: RemoteRead) -> float:
        """Share of a creditor's time that MA for this debtor takes (0: it decodes no more)."""
        if read.peer not in self._loads or not self._loads[read.peer].batch:
            return 0.0
        return self._cost.micro_attention_s(read.rows, read.tokens) / self._period_s(read.peer)

    def _period_s(self, instance: int) -> float:
        """An iteration of the present decode batch, its own MA for others left out."""
        load, cost = self._loads[instance], self._cost
        kernel_s, launch_s, host_s = cost.iteration_terms(load.batch, load.batch, load.batch)
        local_s = cost.decode_attention_s(load.batch, load.context_tokens)
        attention_s = max([local_s, *(self._wait_s(instance, read) for read in load.remote)])
        return max(kernel_s + attention_s, launch_s) + host_s
