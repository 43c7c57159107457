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

**Where the best k lies.** With a prompts admitted at the debtor and b at the creditor, the debtor's iteration is the highest of
a line that falls with k (local attention), one that rises (MA on this creditor) and a level: it falls up to some k and never
after. The MA served rises with k, so the creditor's TPS is level for a while, then falls: a constant, then
c · max(1 − d − e·k, least). TPS is therefore convex where the debtor's iteration falls, on either side of the end of the
creditor's level, and nowhere rises after. So the best k is 0, or an end of such a piece: where a or b changes (both sides of
the step), where the debtor's iteration ceases to fall or the creditor's level ends (both neighbouring integers).

**What is not looked at.** With a prompts admitted the debtor does no better than if it read as little as it can then and waited
for nobody. Where that and the most that the creditor can do are less than what was found already, no such k is priced.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from perfmodel.borrowing import exchange_s, residual_s
from perfmodel.pricing import MAX_SERVED_SHARE
from perfmodel.specs import LinkSpec
from perfmodel.view import ClusterView, Load, RemoteRead, prompt_blocks, read_of

UNLIMITED = 1 << 62  # free blocks


class Offer(NamedTuple):
    """The best number of blocks to lend, and the tokens/s that this adds (0, 0: nothing is better)."""

    num_blocks: int
    gain_tok_per_s: float


class Rates(NamedTuple):
    """Decode iterations of an instance with some waiting prompts admitted, of `prompt_tokens` tokens in all.

    Attention as in `CostModel.decode_attention_terms`.
    """

    prompt_tokens: int
    rows: int
    kernel_s: float
    launch_s: float
    host_s: float
    floor_s: float
    base_s: float
    s_per_token: float

    def busy_s(self, read_tokens: int, wait_s: float) -> float:
        """Kernels, attention and host, where the present batch reads `read_tokens` tokens."""
        context_tokens = max(0, read_tokens + self.prompt_tokens)
        local_s = max(self.floor_s, self.base_s + self.s_per_token * context_tokens)
        return self.kernel_s + max(local_s, wait_s) + self.host_s

    def tok_per_s(self, busy_s: float, launch_s: float, share: float) -> float:
        stretched_s = busy_s / max(1.0 - share, 1.0 - MAX_SERVED_SHARE)
        return self.rows / max(stretched_s, self.launch_s + launch_s + self.host_s, 1e-12)


@dataclass(slots=True, eq=False)
class Terms:
    """Rates of an instance by a = 0 … A, the waiting prompts admitted. Moves change none of this.

    need_blocks[a]: free blocks, those kept back included, from which prompt a is in too (A of them) · prompt_tokens[a]: of the
    first a prompts and their next tokens · decode_times[rows]: a column of `CostModel.decode_table`.
    """

    batch: int
    need_blocks: list[int]
    prompt_tokens: list[int]
    decode_times: list[list[float]]

    def rates(self, admitted: int) -> Rates:
        rows = self.batch + admitted
        return Rates(self.prompt_tokens[admitted], rows, *self.decode_times[rows])

    def admitted(self, free_blocks: int) -> int:
        """Prompts that are in where so many blocks are free."""
        return bisect_right(self.need_blocks, free_blocks)

    def room(self, admitted: int) -> tuple[int, int]:
        """Free blocks, from … to below, with which so many prompts are in."""
        need, last = self.need_blocks, len(self.need_blocks)
        return need[admitted - 1] if admitted else 0, need[admitted] if admitted < last else UNLIMITED


def decode_terms(load: Load, block_tokens: int, decode_times: list[list[float]]) -> Terms:
    need = list(accumulate(prompt_blocks(tokens, block_tokens) for tokens in load.waiting))
    need = [blocks + load.headroom_blocks for blocks in need]
    need[:1] = [blocks + load.kept_blocks - load.headroom_blocks for blocks in need[:1]]
    tokens = list(accumulate((tokens + 1 for tokens in load.waiting), initial=0))
    return Terms(load.batch, need, tokens, decode_times)


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
    launch_s for all its peers. All layers."""

    exchange_s: float
    launch_s: float
    floor_s: float
    base_s: float
    block_s: float

    def ma_s(self, blocks: int) -> float:
        return max(self.floor_s, self.base_s + self.block_s * blocks)


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

    def tok_per_s(self, blocks: int) -> tuple[float, float]:
        """TPS of the debtor and of the creditor with `blocks` blocks moved."""
        debtor, creditor = self.debtor, self.creditor
        lending = debtor.terms.rates(debtor.terms.admitted(debtor.free_blocks + blocks))
        serving = creditor.terms.rates(creditor.terms.admitted(creditor.free_blocks - blocks))
        return self._lending_tok_per_s(lending, blocks), self._serving_tok_per_s(serving, blocks)

    def _lending_tok_per_s(self, rates: Rates, blocks: int) -> float:
        debtor, reads = self.debtor, self.after if blocks else self.before
        others_s = max(0.0, reads.launch_s - self.peer_launch_s)
        wait_s = max(reads.exchange_s + reads.ma_s(blocks), debtor.wait_s) + others_s
        busy_s = rates.busy_s(debtor.context_tokens - self.block_tokens * blocks, wait_s)
        return rates.tok_per_s(busy_s, reads.launch_s, debtor.served_share)

    def _serving_tok_per_s(self, rates: Rates, blocks: int) -> float:
        creditor, reads = self.creditor, self.after if blocks else self.before
        share = creditor.served_share + reads.ma_s(blocks) / self.period_s
        return rates.tok_per_s(rates.busy_s(creditor.context_tokens, creditor.wait_s), creditor.launch_s, share)

    def best(self, block_max: int) -> Offer:
        """The k in 0 … block_max with the highest gain, the smallest of equals. The debtor decodes where block_max > 0."""
        if block_max < 1:
            return Offer(0, 0.0)
        debtor = self.debtor
        now = best = sum(self.tok_per_s(0))
        num_blocks = 0
        servings = self._servings(block_max)
        steps = [step for rates in servings for step in self._serving_ends(rates)]
        most = max(self._serving_tok_per_s(rates, 1) for rates in servings)
        lowest = debtor.terms.admitted(debtor.free_blocks + 1)
        for admitted in range(debtor.terms.admitted(debtor.free_blocks + block_max), lowest - 1, -1):
            rates = debtor.terms.rates(admitted)
            first, end = debtor.terms.room(admitted)
            first, last = max(1, first - debtor.free_blocks), min(end - 1 - debtor.free_blocks, block_max)
            if first > last:
                continue
            lending_most = self._lending_most(rates, last)
            if lending_most + most < best:
                continue
            if lending_most + max(self._serving_tok_per_s(serving, first) for serving in servings) < best:
                continue
            for blocks in ends_of(first, last, [self._falls_until(rates), *steps]):
                total = sum(self.tok_per_s(blocks))
                if total > best or (total == best and blocks < num_blocks):
                    best, num_blocks = total, blocks
        return Offer(num_blocks, best - now)

    def _lending_most(self, rates: Rates, blocks: int) -> float:
        """TPS of the debtor for up to so many k > 0, were no creditor waited for."""
        debtor = self.debtor
        busy_s = rates.busy_s(debtor.context_tokens - self.block_tokens * blocks, 0.0)
        return rates.tok_per_s(busy_s, self.after.launch_s, debtor.served_share)

    def _falls_until(self, rates: Rates) -> float:
        """The k up to which the debtor's iteration gets shorter: local attention meets what does not fall with k."""
        debtor, reads = self.debtor, self.after
        others_s = max(0.0, reads.launch_s - self.peer_launch_s)
        launches = rates.launch_s + reads.launch_s + rates.host_s
        level = launches * max(1.0 - debtor.served_share, 1.0 - MAX_SERVED_SHARE) - rates.host_s - rates.kernel_s
        level = max(level, rates.floor_s, rates.base_s)
        level = max(level, others_s + max(debtor.wait_s, reads.exchange_s + reads.floor_s))
        falling = rates.base_s + rates.s_per_token * (debtor.context_tokens + rates.prompt_tokens)
        fall = rates.s_per_token * self.block_tokens
        rising = others_s + reads.exchange_s + reads.base_s
        return min((falling - level) / fall, (falling - rising) / (fall + reads.block_s))

    def _servings(self, block_max: int) -> list[Rates]:
        """Of the creditor, for 1 … block_max blocks."""
        free_blocks, terms = self.creditor.free_blocks, self.creditor.terms
        lowest, highest = terms.admitted(free_blocks - block_max), terms.admitted(free_blocks - 1)
        return [terms.rates(admitted) for admitted in range(lowest, highest + 1)]

    def _serving_ends(self, rates: Rates) -> tuple[float, float, float]:
        """The k up to which MA keeps to its floor, launches hide it, and the creditor has so many rows."""
        creditor, reads = self.creditor, self.after
        launches = rates.launch_s + creditor.launch_s + rates.host_s
        busy = rates.busy_s(creditor.context_tokens, creditor.wait_s)
        ma_s = (1.0 - creditor.served_share - busy / max(launches, 1e-12)) * self.period_s
        rows_until = creditor.free_blocks - creditor.terms.room(rates.rows - creditor.terms.batch)[0]
        return (reads.floor_s - reads.base_s) / reads.block_s, (ma_s - reads.base_s) / reads.block_s, rows_until


def ends_of(first: int, last: int, steps: Sequence[float]) -> set[int]:
    """The first and last k of the pieces into which `steps` cut first … last."""
    inside = [int(step) for step in steps if first <= step < last]
    return {first, last, *inside, *(step + 1 for step in inside)}


class Pricer:
    """Prices the pairs of a plan. `loads` are those of the plan in the making: they may change between calls."""

    def __init__(self, view: ClusterView, loads: Mapping[int, Load]) -> None:
        self._view, self._loads, self._cost = view, loads, view.belief
        self._terms: dict[int, Terms] = {}
        most_rows = max((load.batch + len(load.waiting) for load in loads.values()), default=0)
        self._decode_times: list[list[float]] = self._cost.decode_table(most_rows)[:, : most_rows + 1].T.tolist()
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
            self._terms[instance] = decode_terms(load, self._view.block_tokens, self._decode_times)
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
