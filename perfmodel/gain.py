"""What a move is worth under belief: tokens per second that lending k blocks adds, at the debtor and at the creditor.

TPS of an instance = rows / iteration, iteration = max((kernels + attention + host) / (1 − share), launches + host): paper.md §4
with the host of simulators.md and the share of its time in which an instance serves others (design.md §3). With k blocks lent,

- the debtor's batch is β′(k): its rows and the waiting prompts that fit, first come first served, at prompt + 1 tokens, into
  free + pledged + k blocks less headroom. Its attention is the longest of local attention (the k blocks no longer read, the
  admitted prompts read) and the waits for each creditor, this one included (perfmodel.borrowing, perfmodel.pricing);
- the creditor's batch is β_c(k), its own prompts losing the k blocks. The MA it serves takes a share of its time, MA / period
  of the debtor: its iterations get as much longer as it serves meanwhile. In the paper's T_creditor = T_lyr + K/g both iterate
  at the same pace. (perfmodel.pricing stretches kernels and local attention alone. To stretch the host's part and the waits too
  is a little dearer, and keeps the argument below true. So does leaving out the early lines of `DecodeTerms`: attention of a few
  rows with short contexts counts as more than it is.)

**Where the best k lies.** Between breakpoints β′ and β_c are constant, the debtor's iteration is one of the lines under its
max(…), hence a + b·k, and the MA served is affine in k. So TPS is β′/(a + b·k) there, plus a constant (a creditor whose
launches hide what it serves) or c · max(1 − d − e·k, least): convex, and its maximum lies on an end. Breakpoints are k = 0, 1
and block_max, every admission at the debtor and every shrink of the creditor (both sides of the step), and every crossing of
two lines under a max(…) (both neighbouring integers). All are evaluated at once, as arrays.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perfmodel.borrowing import exchange_s, residual_s
from perfmodel.pricing import MAX_SERVED_SHARE
from perfmodel.specs import LinkSpec
from perfmodel.view import ClusterView, Load, RemoteRead, read_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Numbers = Floats | float
FEW_BLOCKS = 32  # up to here each number is looked at


class Offer(NamedTuple):
    """The best number of blocks to lend, and the tokens/s that this adds (0, 0: nothing is better)."""

    num_blocks: int
    gain_tok_per_s: float


class Rates(NamedTuple):
    """Decode iterations of an instance with so many waiting prompts admitted: numbers, or arrays along admissions or moves.

    `prompt_tokens` of those prompts; attention as in `CostModel.decode_attention_terms`.
    """

    prompt_tokens: Numbers
    rows: Numbers
    kernel_s: Numbers
    launch_s: Numbers
    host_s: Numbers
    floor_s: Numbers
    base_s: Numbers
    s_per_token: Numbers

    def busy_s(self, read_tokens: Numbers | Ints, wait_s: Numbers) -> Floats:
        """Kernels, attention and host, where the present batch reads `read_tokens` tokens."""
        context_tokens = np.maximum(read_tokens + self.prompt_tokens, 0.0)
        local_s = np.maximum(self.floor_s, self.base_s + self.s_per_token * context_tokens)
        busy_s: Floats = self.kernel_s + np.maximum(local_s, wait_s) + self.host_s
        return busy_s

    def tok_per_s(self, busy_s: Floats, launch_s: Numbers, share: Numbers) -> Floats:
        stretched_s = busy_s / np.maximum(1.0 - share, 1.0 - MAX_SERVED_SHARE)
        iteration_s: Floats = np.maximum(stretched_s, self.launch_s + launch_s + self.host_s)
        return self.rows / np.maximum(iteration_s, 1e-12)


@dataclass(slots=True, eq=False)
class Terms:
    """Rates of an instance by a = 0 … A, the waiting prompts admitted (arrays of A + 1). Moves change none of this.

    need_blocks[a]: free blocks, those kept back included, from which prompt a is in too (array of A).
    """

    need_blocks: Ints
    rates: Rates
    _table: Floats = field(init=False)
    _first: Rates = field(init=False)

    def __post_init__(self) -> None:
        self._table = np.array(self.rates)
        self._first = Rates(*self._table[:, 0].tolist())

    def within(self, free_blocks: Ints) -> Rates:
        """With the prompts that are in where so many blocks are free."""
        if not len(self.need_blocks):
            return self._first
        admitted = self.need_blocks.searchsorted(free_blocks, "right")
        return Rates(*self._table.take(admitted, axis=1))


def decode_terms(load: Load, block_tokens: int, times: Callable[[int], Floats]) -> Terms:
    """Terms of an instance, up to the prompts that can be in once its longest request has left. `times`:
    `CostModel.decode_table`."""
    prompts = np.array(load.waiting, dtype=np.int64)
    need = np.cumsum(prompts // block_tokens + 1) + load.headroom_blocks
    need[:1] += load.kept_blocks - load.headroom_blocks
    movable = max((request.movable_blocks for request in load.longest), default=0)
    count = int(np.searchsorted(need, load.free_blocks + load.pledged_blocks + movable, "right"))
    first, last = load.batch, load.batch + count
    tokens = np.zeros(count + 1)
    np.cumsum(prompts[:count] + 1, out=tokens[1:])
    rows = np.arange(first, last + 1, dtype=np.float64)
    return Terms(need[:count], Rates(tokens, rows, *times(last)[:, first : last + 1]))


class Side(NamedTuple):
    """An instance before the move, and what the move does not change.

    wait_s: for the slowest of its other creditors · launch_s: the launches that its present creditors cost it (both of all
    layers) · served_share: share of its time that MA for other debtors takes.
    """

    terms: Terms
    free_blocks: int  # pledged ones included
    context_tokens: int
    wait_s: float
    launch_s: float
    served_share: float


class Reads(NamedTuple):
    """What a debtor reads on one creditor: MA = max(floor_s, base_s + block_s · k), exchange_s what it waits for besides;
    launch_s for all its peers. All layers; numbers, or arrays along k."""

    exchange_s: Numbers
    launch_s: Numbers
    floor_s: Numbers
    base_s: Numbers
    block_s: Numbers


@dataclass(slots=True, eq=False)
class Pair:
    """A debtor that may lend blocks to a creditor. `before` holds for k = 0, `after` for k > 0 (one more row reads there)."""

    block_tokens: int
    debtor: Side
    creditor: Side
    before: Reads
    after: Reads
    peer_launch_s: float
    period_s: float  # of the debtor's iterations

    def tok_per_s(self, blocks: Ints) -> tuple[Floats, Floats]:
        """TPS of the debtor and of the creditor with `blocks` blocks moved."""
        debtor, creditor = self.debtor, self.creditor
        reads = Reads(*np.array((self.before, self.after)).T.take(blocks > 0, axis=1))
        ma_s = np.maximum(reads.floor_s, reads.base_s + reads.block_s * blocks)
        others_s = np.maximum(reads.launch_s - self.peer_launch_s, 0.0)
        wait_s = np.maximum(reads.exchange_s + ma_s, debtor.wait_s) + others_s
        rates = debtor.terms.within(debtor.free_blocks + blocks)
        busy_s = rates.busy_s(debtor.context_tokens - self.block_tokens * blocks, wait_s)
        lending = rates.tok_per_s(busy_s, reads.launch_s, debtor.served_share)
        rates = creditor.terms.within(creditor.free_blocks - blocks)
        busy_s = rates.busy_s(creditor.context_tokens, creditor.wait_s)
        share = creditor.served_share + ma_s / self.period_s
        return lending, rates.tok_per_s(busy_s, creditor.launch_s, share)

    def best(self, block_max: int) -> Offer:
        """The k in 0 … block_max with the highest gain, the smallest of equals. The debtor decodes where block_max > 0."""
        if block_max < 1:
            return Offer(0, 0.0)
        blocks = self._breakpoints(block_max) if block_max > FEW_BLOCKS else np.arange(block_max + 1)
        tok_per_s = np.add(*self.tok_per_s(blocks))
        i = int(tok_per_s.argmax())
        return Offer(int(blocks[i]), float(tok_per_s[i] - tok_per_s[0]))

    def _breakpoints(self, block_max: int) -> Ints:
        """Sorted, from 0 to block_max."""
        admissions = self.debtor.terms.need_blocks - self.debtor.free_blocks
        shrinks = self.creditor.free_blocks - self.creditor.terms.need_blocks
        firsts = (*self._debtor_crossings(), *self._creditor_crossings(), admissions - 1, shrinks, (0,))
        points = np.concatenate(firsts)
        points = np.floor(points[(points >= 0) & (points < block_max)])
        steps = np.concatenate((points, points + 1, (0, block_max)))
        steps.sort()
        return steps.astype(np.int64)

    def _debtor_crossings(self) -> tuple[Any, ...]:
        """k where lines under a max(…) meet, whatever the admissions. Of three lines: one falls (local attention), one rises
        (this creditor's MA), and the highest of the rest is level."""
        debtor, rates, reads = self.debtor, self.debtor.terms.rates, self.after
        others_s = max(0.0, reads.launch_s - self.peer_launch_s)
        launches = rates.launch_s + reads.launch_s + rates.host_s
        level = launches * max(1.0 - debtor.served_share, 1.0 - MAX_SERVED_SHARE) - rates.host_s - rates.kernel_s
        level = np.maximum(level, np.maximum(rates.floor_s, rates.base_s))
        level = np.maximum(level, others_s + max(debtor.wait_s, reads.exchange_s + reads.floor_s))
        falling = rates.base_s + rates.s_per_token * (debtor.context_tokens + rates.prompt_tokens)
        fall = rates.s_per_token * self.block_tokens
        rising = others_s + reads.exchange_s + reads.base_s
        return (falling - level) / fall, (level - rising) / reads.block_s, (falling - rising) / (fall + reads.block_s)

    def _creditor_crossings(self) -> tuple[Any, ...]:
        """Where what the creditor serves is no longer hidden by its launches, or leaves its floor."""
        creditor, rates, reads = self.creditor, self.creditor.terms.rates, self.after
        launches = rates.launch_s + creditor.launch_s + rates.host_s
        busy = rates.busy_s(creditor.context_tokens, creditor.wait_s)
        ma_s = (1.0 - creditor.served_share - busy / np.maximum(launches, 1e-12)) * self.period_s
        return (ma_s - reads.base_s) / reads.block_s, ((reads.floor_s - reads.base_s) / reads.block_s,)


class Pricer:
    """Prices the pairs of a plan. `loads` are those of the plan in the making: they may change between calls."""

    def __init__(self, view: ClusterView, loads: Mapping[int, Load]) -> None:
        self._view, self._loads, self._cost = view, loads, view.belief
        self._terms: dict[int, Terms] = {}
        self._periods: dict[int, tuple[Load, float]] = {}  # with the load it holds for
        self._exchanges: dict[tuple[LinkSpec, int], float] = {}
        layers, engine = self._cost.instance.model.num_layers, self._cost.instance.engine
        self._peer_launch_s = layers * engine.exchange_s_per_layer_per_peer * self._cost.scale["host"]
        self._residuals = {i: layers * residual_s(self._cost, self._longest_s(load)) for i, load in loads.items()}
        self.least_residual_s = min(self._residuals.values(), default=0.0)

    def spare_s(self, debtor: int) -> float:
        """What may go by before a creditor begins with a first block, so that the debtor need not wait for it; all layers.

        A creditor whose `exchange_s` is longer can hide nothing (`can_hide`): a quick look, before a pair is priced.
        """
        load, block_tokens = self._loads[debtor], self._view.block_tokens
        local_s = self._cost.decode_attention_s(load.batch, max(0, load.context_tokens - block_tokens))
        return local_s - self._cost.micro_attention_s(1, block_tokens)

    def can_hide(self, debtor: int, creditor: int, spare_s: float) -> bool:
        """Whether a first block's exchange takes no longer than `spare_s`: what the creditor runs is looked at first."""
        return self._residuals[creditor] <= spare_s and self.exchange_s(debtor, creditor) <= spare_s

    def exchange_s(self, debtor: int, creditor: int, rows: int = 1) -> float:
        """What a debtor waits for besides MA, all layers. An idle creditor keeps no query waiting."""
        key = (self._view.link(debtor, creditor), rows)
        wire_s = self._exchanges.get(key)
        if wire_s is None:
            wire_s = self._cost.instance.model.num_layers * exchange_s(self._cost, *key)
            self._exchanges[key] = wire_s
        return wire_s + self._residuals[creditor]

    def reads(self, debtor: int, creditor: int) -> tuple[Reads, Reads]:
        """Of the debtor on the creditor: as they are, and with one row more."""
        load = self._loads[debtor]
        before = read_of(load.remote, creditor)
        after = before.one_more_row(0, max(1, load.batch))
        peers = self._peers(debtor)
        return self._reads(debtor, before, peers), self._reads(debtor, after, peers + (not before.rows))

    def hidden_blocks(self, debtor: int, reads: Reads, limit: int) -> int:
        """Blocks, at most `limit`, up to which the debtor's layers need not wait for this creditor: exchange + MA + residual is
        within the local attention left after the move, before anything is admitted into the room."""
        load, block_tokens = self._loads[debtor], self._view.block_tokens
        terms = self._cost.decode_attention_terms(load.batch)

        def waits(blocks: int) -> bool:
            context_tokens = max(0, load.context_tokens - block_tokens * blocks)
            local_s = terms.at(context_tokens)
            return bool(reads.exchange_s + max(reads.floor_s, reads.base_s + reads.block_s * blocks) > local_s)

        if limit < 1 or waits(1):
            return 0
        return bisect_left(range(1, limit + 1), True, key=waits) if waits(limit) else limit

    def pair(self, debtor: int, creditor: int, reads: tuple[Reads, Reads]) -> Pair:
        lender = self._side(debtor, self._slowest_s(debtor, but=creditor), self._served_share(debtor))
        others_s = max(0.0, (self._peers(creditor) - 1) * self._peer_launch_s)
        wait_s, share = self._slowest_s(creditor) + others_s, self._served_share(creditor, but=debtor)
        sides = lender, self._side(creditor, wait_s, share)
        return Pair(self._view.block_tokens, *sides, *reads, self._peer_launch_s, self._period_s(debtor))

    # ---- one instance --------------------------------------------------------------------------------------------------------
    def _longest_s(self, load: Load) -> float:
        """The longest iteration that the instance is known to run: its last one, or the end of its longest waiting prompt.
        While it computes prompts, its kernels keep queries waiting longest; an idle one keeps none waiting."""
        last_s = 0.0 if load.idle else load.iteration_s
        return max(last_s, self._chunk_s(max(load.waiting))) if load.waiting else last_s

    def _chunk_s(self, prompt_tokens: int) -> float:
        """Iteration of a prompt's last chunk, alone."""
        tokens = min(prompt_tokens, self._cost.instance.token_budget)
        kernel_s, launch_s, host_s = self._cost.iteration_terms(tokens, 0, 1)
        attention_s = self._cost.prefill_attention_s(tokens, prompt_tokens - tokens)
        return max(kernel_s + attention_s, launch_s) + host_s

    def _side(self, instance: int, wait_s: float, served_share: float) -> Side:
        load = self._loads[instance]
        if instance not in self._terms:
            self._terms[instance] = decode_terms(load, self._view.block_tokens, self._cost.decode_table)
        free_blocks, launch_s = load.free_blocks + load.pledged_blocks, self._peers(instance) * self._peer_launch_s
        return Side(self._terms[instance], free_blocks, load.context_tokens, wait_s, launch_s, served_share)

    def _reads(self, debtor: int, read: RemoteRead, peers: int) -> Reads:
        launch_s = peers * self._peer_launch_s
        if not read.rows:
            return Reads(0.0, launch_s, 0.0, 0.0, 0.0)
        floor_s, base_s, s_per_token = self._cost.micro_attention_terms(read.rows)[:3]
        wait_s, block_s = self.exchange_s(debtor, read.peer, read.rows), s_per_token * self._view.block_tokens
        return Reads(wait_s, launch_s, floor_s, base_s + s_per_token * read.tokens, block_s)

    def _peers(self, instance: int) -> int:
        """Live instances that it reads on."""
        return sum(read.peer in self._loads and read.rows > 0 for read in self._loads[instance].remote)

    def _slowest_s(self, debtor: int, but: int | None = None) -> float:
        """From sending a layer's queries until the last partial state is back, all layers; one creditor left out."""
        return max((self._wait_s(debtor, read) for read in self._loads[debtor].remote if read.peer != but), default=0.0)

    def _wait_s(self, debtor: int, read: RemoteRead) -> float:
        if not read.rows or read.peer not in self._loads:
            return 0.0
        return self.exchange_s(debtor, read.peer, read.rows) + self._cost.micro_attention_s(read.rows, read.tokens)

    def _served_share(self, creditor: int, but: int | None = None) -> float:
        """Share of its time that MA for others takes; one debtor left out, and those that are gone or decode no more."""
        reads = [read for read in self._loads[creditor].served if read.peer != but and read.peer in self._loads]
        return sum(
            self._cost.micro_attention_s(read.rows, read.tokens) / self._period_s(read.peer)
            for read in reads
            if self._loads[read.peer].batch
        )

    def _period_s(self, instance: int) -> float:
        """An iteration of the present decode batch, its own MA for others left out."""
        load, known = self._loads[instance], self._periods.get(instance)
        if known is None or known[0] is not load:
            known = self._periods[instance] = load, self._price_period(instance)
        return known[1]

    def _price_period(self, instance: int) -> float:
        load, cost, peers = self._loads[instance], self._cost, self._peers(instance)
        kernel_s, launch_s, host_s = cost.iteration_terms(load.batch, load.batch, load.batch)
        remote_s = self._slowest_s(instance) + max(0, peers - 1) * self._peer_launch_s
        attention_s = max(cost.decode_attention_s(load.batch, load.context_tokens), remote_s)
        return max(kernel_s + attention_s, launch_s + peers * self._peer_launch_s) + host_s
