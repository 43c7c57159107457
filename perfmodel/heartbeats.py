"""Reporter: what an instance tells the gManager, and when.

Entries are sent when they have changed since the last heartbeat that was answered; everything, when the gManager asks for it.
An idle instance tells the same once more only every `REST_PERIODS` periods, as long as nobody needs blocks.
"""

from heapq import nlargest
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from perfmodel.batching import Row
from perfmodel.messages import (
    DISPATCHER,
    GMANAGER,
    Heartbeat,
    HeartbeatReply,
    Need,
    OrderId,
    RequestPlacementEntry,
    Send,
)
from perfmodel.view import Load, Movable, RemoteRead, SchedulerParams

if TYPE_CHECKING:
    from perfmodel.rmanager import RManager

MIN_GAP = 0.05  # of a period between two heartbeats
REST_PERIODS = 3  # between two heartbeats of an idle instance that has nothing new to tell
LONGEST = 4  # requests whose length a heartbeat tells; more than that do not move within a period
WAITING = 64  # waiting prompts that a heartbeat lists
GROWTH_BLOCKS = 64  # blocks asked for when a request cannot grow
MIN_SHARE_BLOCKS = 16  # a prompt larger than its instance wants at least this much room at home
MOVE_BACK_WAIT_FRAC = 0.1  # share of time waiting for others above which a debtor with room takes a loan back


class _Sent(NamedTuple):
    """A heartbeat that orders may rest on."""

    sent_s: float
    entries: dict[tuple[int, int], RequestPlacementEntry]
    load: Load


class Reporter:
    """Heartbeats of one RManager, every `heartbeat_s`, half a period before the gManager plans."""

    def __init__(self, owner: "RManager", params: SchedulerParams, now_s: float) -> None:
        self.owner = owner
        self.params = params
        self.due_s = now_s + params.heartbeat_s / 2
        self._seq = 0
        self._reported_s = now_s
        self._full = True
        self._sent: dict[int, _Sent] = {}
        self._answered: dict[tuple[int, int], RequestPlacementEntry] = {}
        self._known_load: Load | None = None  # what the gManager knows, and nobody needs blocks
        self._rests = False
        self._answered_seq = 0
        self._outcomes: dict[int, tuple[tuple[OrderId, str], ...]] = {}
        self._capacity_order: OrderId | None = (
            None  # the last one that was being granted; its outcome is not kept waiting
        )
        self._urgent_for: int | None = None  # the needy request that a heartbeat was hurried for
        self._waited_s = 0.0
        self._since_s = now_s

    def age_s(self, seq: int, now_s: float) -> float:
        """How long ago heartbeat `seq` was sent; infinite where it was not, or long ago."""
        return now_s - self._sent[seq].sent_s if seq in self._sent else float("inf")

    def report(self, now_s: float) -> None:
        """Send a heartbeat and set the time of the next."""
        self._reported_s = now_s
        self._seq += 1
        longest = self._longest()
        entries, load = self._entries(longest), self._load(longest)
        self._note_sent(_Sent(now_s, entries, load))
        borrower = self.owner.borrower
        if borrower.outcomes:
            self._outcomes[self._seq] = tuple(borrower.outcomes)
            borrower.outcomes.clear()
        heartbeat = Heartbeat(
            incarnation=self.owner.incarnation,
            seq=self._seq,
            full=self._full,
            entries=tuple(entries.values()) if self._full else self._changes(entries),
            load=load,
            needs=tuple(self.needs()),
            outcomes=tuple(o for outcomes in self._outcomes.values() for o in outcomes),
            open_order=borrower.open_order,
            youngest=self._youngest(),
        )
        self.owner.commands.append(Send(GMANAGER, heartbeat))
        if self.owner.load_report() != self.owner.load_told:
            self.owner.commands.append(Send(DISPATCHER, self.owner.tell_load()))
        self._take_back(now_s)
        news = heartbeat.entries or heartbeat.outcomes or load != self._known_load
        self._rests = not news and self.owner.idle
        self.due_s = now_s + self.params.heartbeat_s * (REST_PERIODS if self._rests else 1)

    def _note_sent(self, sent: _Sent) -> None:
        """Remember this heartbeat, and forget those that no order can rest on any more."""
        self._sent[self._seq] = sent
        while sent.sent_s - self._sent[oldest := next(iter(self._sent))].sent_s > 4 * self.params.order_ttl_s:
            del self._sent[oldest]

    def _wake(self, now_s: float) -> None:
        """The next heartbeat goes out when it would have without the rest."""
        self._rests, self.due_s = False, self._reported_s
        while self.due_s < now_s or self.due_s == self._reported_s:
            self.due_s += self.params.heartbeat_s

    def on_reply(self, reply: HeartbeatReply, now_s: float) -> None:
        if reply.seq <= self._answered_seq:
            return  # late: what a newer one has said holds
        self._answered_seq = reply.seq
        sent = self._sent.get(reply.seq)
        self._known_load = sent.load if sent and reply.may_rest else None
        if sent and not reply.resync:
            self._answered = sent.entries
            self._full = False
        elif reply.resync:
            self._full = True
            self.due_s = now_s
        self.owner.borrower.note_gmanager(reply.gmanager_incarnation)
        if self._outcomes:
            self._outcomes = {seq: o for seq, o in self._outcomes.items() if seq > reply.seq}
        if reply.barrier != self.owner.batcher.barrier:
            self.owner.batcher.barrier = reply.barrier
            self.owner.replan()

    def hurry(self, now_s: float) -> None:
        """A waiting request needs blocks: tell it now, once per request: one that is refused tries again a period later."""
        owner = self.owner
        if self._rests and not (owner.idle and self._load([]) == self._known_load):
            self._wake(now_s)
        if not (owner.batcher.waiting or owner.borrower.suspended or owner.borrower.has_news):
            return
        needy = next((need.req_id for need in self.needs()), None)
        if needy is None and owner.step is not None and owner.batcher.lacks_room():
            needy = owner.batcher.waiting[0].req_id
        granted = any(order == self._capacity_order for order, _ in owner.borrower.outcomes)
        self._capacity_order = owner.borrower.open_order or self._capacity_order
        if not granted and (needy is None or needy == self._urgent_for):
            return
        earliest_s = self._reported_s + MIN_GAP * self.params.heartbeat_s
        self.due_s = min(self.due_s, max(now_s, earliest_s))
        if needy is not None:
            self._urgent_for = needy

    # ---- content -------------------------------------------------------------------------------------------------------------
    def load(self) -> Load:
        """The instance as the gManager sees it."""
        return self._load(self._longest())

    def _load(self, longest: list[Row]) -> Load:
        owner = self.owner
        batcher, pool, borrower = owner.batcher, owner.pool, owner.borrower
        size = owner.limits.batch.block_tokens
        return Load(
            total_blocks=pool.total,
            free_blocks=pool.free,
            pledged_blocks=borrower.debtor.pledged_blocks(),
            lent_blocks=pool.lent + pool.reserved,
            headroom_blocks=owner.limits.batch.headroom_blocks,
            batch=len(batcher.decoding),
            context_tokens=batcher.context_tokens - batcher.remote_tokens,
            remote=borrower.remote_reads(),
            served=tuple(RemoteRead(p, rows, blocks * size) for p, rows, blocks in owner.creditor.served()),
            waiting=tuple(row.remaining_tokens for row in batcher.waiting[:WAITING]),
            longest=tuple(Movable(row.req_id, batcher.kv_tokens(row), borrower.num_movable(row)) for row in longest),
            iteration_s=owner.iteration_s,
        )

    def _longest(self) -> list[Row]:
        """Decode rows grow alike: what they differ by is known since they joined."""
        return nlargest(
            LONGEST, self.owner.batcher.decoding.values(), key=lambda row: row.joined_tokens - row.joined_at
        )

    def needs(self) -> list[Need]:
        """Requests that want blocks elsewhere, oldest first: a prompt larger than what is not lent here, a row that cannot grow."""
        owner = self.owner
        needs = [self._growth(row) for row in owner.borrower.suspended.values()]
        first = owner.batcher.waiting[0] if owner.batcher.waiting else None
        if first is not None and first.blocks_needed > owner.pool.total - owner.pool.lent - owner.pool.reserved:
            idle = not owner.batcher.decoding and not owner.batcher.prefilling
            share = owner.pool.free - (0 if idle else owner.limits.batch.headroom_blocks)
            if share >= min(MIN_SHARE_BLOCKS, owner.pool.total):
                needs.append(self._prompt(first, min(share, first.blocks_needed)))
        return sorted(needs, key=lambda need: need.sequence)

    def _prompt(self, row: Row, share: int) -> Need:
        """At home it wants room for the chunk being computed and the one being sent at least."""
        limits = self.owner.limits.batch
        more = max(0, share - 2 * self.owner.batcher.blocks_for(limits.token_budget) - 1)
        return Need(row.req_id, row.blocks_needed - share, row.sequence, more_blocks=more)

    def _growth(self, row: Row) -> Need:
        blocks = min(GROWTH_BLOCKS, self.owner.borrower.num_movable(row))
        return Need(row.req_id, blocks, row.sequence, grows=True)

    def _entries(self, longest: list[Row]) -> dict[tuple[int, int], RequestPlacementEntry]:
        owner, entries = self.owner, {}
        for row in longest:
            local = len(row.blocks) - row.remote_blocks
            entries[row.req_id, owner.instance] = RequestPlacementEntry(row.req_id, owner.instance, local, True)
        for req_id, loans in owner.borrower.debtor.by_request.items():
            for loan in loans:
                key = (req_id, loan.id.creditor)
                before = entries[key].num_blocks if key in entries else 0
                entries[key] = RequestPlacementEntry(req_id, loan.id.creditor, before + loan.num_blocks, False)
        return entries

    def _changes(self, entries: dict[tuple[int, int], RequestPlacementEntry]) -> tuple[RequestPlacementEntry, ...]:
        changed = [entry for key, entry in entries.items() if self._answered.get(key) != entry]
        gone = [
            RequestPlacementEntry(entry.req_id, entry.inst_id, 0, entry.local)
            for key, entry in self._answered.items()
            if key not in entries
        ]
        return tuple(changed + gone)

    def _youngest(self) -> tuple[int, int] | None:
        row = max(self.owner.rows_with_blocks(), key=attrgetter("sequence"), default=None)
        return None if row is None else (row.sequence, row.req_id)

    # ---- move-back -----------------------------------------------------------------------------------------------------------
    def _take_back(self, now_s: float) -> None:
        """A debtor that waits for others much of its time, and has room, takes its smallest loan back."""
        owner = self.owner
        waited_s = owner.remote_wait_s - self._waited_s
        span_s, self._since_s, self._waited_s = now_s - self._since_s, now_s, owner.remote_wait_s
        held = [loan for loan in owner.borrower.debtor.loans.values() if loan.committed == loan.num_blocks > 0]
        if not held or owner.batcher.waiting or waited_s < MOVE_BACK_WAIT_FRAC * span_s:
            return
        smallest = min(held, key=lambda loan: (loan.num_blocks, loan.id))
        if smallest.num_blocks + owner.limits.batch.headroom_blocks <= owner.pool.free // 2:
            owner.borrower.move_back(smallest)
