"""Shadow: what every KV block of every instance holds, kept apart from the machines, and what that forbids.

It looks at what RManagers hear and order, and follows the data: an iteration writes and reads blocks, a Store copies them to the
creditor, a fetch copies them back. A block holds (request, run, position), `run` being one computation of the request from its
first token on; while something is written into it, it holds `LANDING`. So it is caught at once when a block is freed under its
reader, written twice, served for another request, or never filled.

Checked at each completed iteration: every row has used each of its KV blocks exactly once, with the right contents, and what it
read elsewhere was being served to it. Checked after every event: a loan that was gone at its creditor never comes back, and none
shrinks below what a running iteration reads (the fence); what is newly lent leaves the headroom and keeps to the cap; no order is
carried out on news that is older than its time to live.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from perfmodel.batching import NO_BLOCK
from perfmodel.messages import (
    Heartbeat,
    IterationsDone,
    MessageReceived,
    MoveKvCache,
    PostReceive,
    ReadEnded,
    ReadStarted,
    RefuseRead,
    Send,
    Serve,
    StartFetch,
    StartIterations,
    StartTransfer,
    TransferDone,
)
from perfmodel.rmanager import RManager

LANDING = "landing"  # being written
TORN = "torn"  # copied from a block that changed meanwhile


@dataclass
class Table:
    """What one row of a step uses: contents that block `local[p]` must have, and positions read from loans."""

    req_id: int
    run: int
    local: dict
    remote: list  # (loan, positions read)


@dataclass
class Copy:
    """Blocks being copied: where they were read, and what they held at first."""

    source: object = None
    blocks: tuple = ()
    contents: list = field(default_factory=list)
    target: object = None
    into: tuple = ()
    wants: tuple = ()  # of a fetch: (loan, first position, end)


class Shadow:
    """`refused`: (time, loan) of every read answered with `Stale`."""

    def __init__(self):
        self.refused = []
        self._memory = {}  # RManager → {block: contents}
        self._managers = {}  # (instance, incarnation) → the last RManager under that name
        self._loans = {}  # RManager → (loans of others it holds, loans it has held)
        self._steps = {}  # RManager → tables of the step in progress
        self._serving = {}  # (RManager, reader, read) → {loan: blocks}
        self._stores, self._fetches = {}, {}  # transfer → Copy
        self._runs = {}  # (RManager, req_id) → run
        self._num_runs = 0
        self._was_open = False  # the loan of the copy that ends now
        self._heartbeats = {}  # (RManager, seq) → when it was sent

    # ---- hooks -----------------------------------------------------------------------------------------------------------
    def before(self, manager, event):
        self._meet(manager)
        if isinstance(event, IterationsDone) and event.num_iterations:
            self._check_step(manager)
        elif isinstance(event, TransferDone):
            self._was_open = event.ok and event.loan in manager.borrower.debtor.loans
            self._end_copy(manager, event)

    def after(self, manager, event, commands, now_s):
        if isinstance(event, IterationsDone):
            self._grow(manager)
            if event.ended:
                self._steps.pop(manager)
        elif isinstance(event, ReadEnded):
            self._serving.pop((manager, event.reader, event.read), None)
        self._check_loans(manager, commands)
        self._check_fence(manager, event)
        self._check_order(manager, event, now_s)
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, Heartbeat):
                self._heartbeats[manager, command.message.seq] = now_s
            elif isinstance(command, StartIterations):
                self._start_step(manager, command)
            elif isinstance(command, StartTransfer):
                copy = self._stores[command.transfer] = Copy()
                self._read_from(copy, manager, command.blocks)
            elif isinstance(command, PostReceive):
                self._write_into(self._stores[command.transfer], manager, command.blocks)
            elif isinstance(command, StartFetch):
                end = command.first + len(command.blocks)
                copy = self._fetches[command.transfer] = Copy(wants=(command.loan, command.first, end))
                self._write_into(copy, manager, command.blocks)
            elif isinstance(command, Serve):
                self._serve(manager, event)
            elif isinstance(command, RefuseRead):
                self.refused += [(now_s, loan) for loan in command.stale]

    def _meet(self, manager):
        if manager not in self._memory:
            self._managers[manager.instance, manager.incarnation] = manager
            self._memory[manager], self._loans[manager] = {}, (set(), set())

    # ---- steps -----------------------------------------------------------------------------------------------------------
    def _start_step(self, manager, step):
        size, batcher = manager.limits.batch.block_tokens, manager.batcher
        reads = dict(step.reads)
        tables = self._steps[manager] = []
        rows = {row.req_id: row for row in batcher.prefilling}
        spans = [(rows[c.req_id], c.prefix_tokens, c.prefix_tokens + c.tokens) for c in step.chunks]
        if step.decode_rows:
            spans += [(row, batcher.kv_tokens(row), batcher.kv_tokens(row) + 1) for row in batcher.decoding.values()]
        for row, begin, end in spans:
            if not begin:
                self._num_runs += 1
                self._runs[manager, row.req_id] = self._num_runs
            run = self._runs[manager, row.req_id]
            local = {p: b for p, b in enumerate(row.blocks[: -(-end // size)]) if b != NO_BLOCK}
            loans = manager.borrower.debtor.by_request.get(row.req_id, ())
            remote = [(loan.id, loan.positions[: reads[loan.id]]) for loan in loans if loan.id in reads]
            used = sorted([*local, *(p for _, positions in remote for p in positions)])
            assert used == list(range(-(-end // size))), f"request {row.req_id} uses its blocks as {used}"
            tables.append(Table(row.req_id, run, local, remote))
            self._write(manager, tables[-1], begin, range(begin // size, -(-end // size)))

    def _write(self, manager, table, begin, positions):
        """New tokens from `begin` on: blocks they begin are filled anew, the one they continue must hold what came before."""
        memory, size = self._memory[manager], manager.limits.batch.block_tokens
        for p in positions:
            if p * size >= begin:
                memory[table.local[p]] = (table.req_id, table.run, p)
            self._check_block(manager, table.local[p], table, p)

    def _grow(self, manager):
        """Decode rows have filled blocks that they were given meanwhile."""
        batcher, size = manager.batcher, manager.limits.batch.block_tokens
        for table in self._steps[manager]:
            row = batcher.decoding.get(table.req_id) or manager.borrower.suspended.get(table.req_id)
            if row is not None and (table.local or table.remote):
                first = 1 + max([*table.local, *(p for _, positions in table.remote for p in positions)])
                new = range(first, min(len(row.blocks), -(-(batcher.kv_tokens(row) + 1) // size)))
                table.local |= {p: row.blocks[p] for p in new}
                self._write(manager, table, first * size, new)

    def _check_step(self, manager):
        for table in self._steps[manager]:
            for p, block in table.local.items():
                self._check_block(manager, block, table, p)
            for loan, positions in table.remote:
                creditor, blocks = self._served(manager, loan, len(positions))
                for p, block in zip(positions, blocks, strict=True):
                    self._check_block(creditor, block, table, p)

    def _check_block(self, manager, block, table, position):
        found, wanted = self._memory[manager].get(block), (table.req_id, table.run, position)
        assert found == wanted, f"block {block} of instance {manager.instance} holds {found}, {wanted} is read there"

    def _served(self, debtor, loan, num_blocks):
        creditor = self._managers[loan.creditor, loan.creditor_incarnation]
        for (server, reader, _), loans in self._serving.items():
            if server is creditor and reader == debtor.instance and len(loans.get(loan, ())) >= num_blocks:
                return creditor, loans[loan][:num_blocks]
        raise AssertionError(f"instance {debtor.instance} has used {num_blocks} blocks of {loan}, which nobody serves")

    def _serve(self, manager, event):
        assert isinstance(event, ReadStarted)
        blocks = {loan: tuple(manager.creditor.loans[loan].blocks[:n]) for loan, n in event.reads}
        self._serving[manager, event.reader, event.read] = blocks
        for copy in self._fetches.values():
            loan, first, end = copy.wants
            if copy.source is None and event.reads == ((loan, end),):
                self._read_from(copy, manager, blocks[loan][first:])

    # ---- copies ----------------------------------------------------------------------------------------------------------
    def _read_from(self, copy, manager, blocks):
        copy.source, copy.blocks = manager, blocks
        copy.contents = [self._memory[manager].get(block) for block in blocks]

    def _write_into(self, copy, manager, blocks):
        copy.target, copy.into = manager, blocks
        self._memory[manager].update(dict.fromkeys(blocks, LANDING))

    def _end_copy(self, manager, event):
        copy = self._fetches.pop(event.transfer, None) or self._stores.get(event.transfer)
        if not event.ok or copy.target is not manager:
            return
        for held, block, into in zip(copy.contents, copy.blocks, copy.into, strict=True):
            intact = self._memory[copy.source].get(block) == held
            self._memory[manager][into] = held if intact else TORN

    # ---- loans -----------------------------------------------------------------------------------------------------------
    def _check_loans(self, manager, commands):
        held, ever = self._loans[manager]
        now = set(manager.creditor.loans)
        again = (now - held) & ever
        assert not again, f"instance {manager.instance} lends {again} once more, after it was gone"
        self._loans[manager] = (now, ever | now)
        if now - held:
            self._check_room(manager, [manager.creditor.loans[loan] for loan in now - held], commands)

    def _check_room(self, manager, new, commands):
        """What is lent leaves the headroom, which only requests of the instance itself may take; the throughput path has a cap."""
        pool, creditor = manager.pool, manager.creditor
        if not any(isinstance(command, StartIterations) for command in commands):
            assert pool.free >= creditor.headroom_blocks, f"instance {manager.instance} lends its headroom: {new}"
        cap = int(creditor.params.lent_cap_frac * pool.total)
        if not any(loan.capacity for loan in new):
            assert pool.lent + pool.reserved <= cap, f"instance {manager.instance} lends more than {cap} blocks: {new}"

    def _check_fence(self, manager, event):
        """A loan may be gone by the end of its creditor or its lease, but neither shrinks nor goes because its tail is back."""
        reads = manager.step.reads if manager.step else {}
        loans = manager.borrower.debtor.loans
        if isinstance(event, TransferDone) and event.loan in reads:
            assert not self._was_open or event.loan in loans, f"{event.loan} is given back while it is read"
        for loan_id, num_blocks in reads.items():
            shrunk = loan_id in loans and loans[loan_id].num_blocks < num_blocks
            assert not shrunk, f"{loan_id} has shrunk while {num_blocks} blocks of it are read"

    def _check_order(self, manager, event, now_s):
        order = event.message if isinstance(event, MessageReceived) else None
        opened = [loan for loan in manager.borrower.debtor.loans.values() if loan.opened_s == now_s and not loan.listed]
        if isinstance(order, MoveKvCache) and any(loan.req_id == order.req_id for loan in opened):
            age_s = now_s - self._heartbeats[manager, order.heartbeat]
            assert age_s <= manager.borrower.params.order_ttl_s, f"{order} is {age_s:g} s old"


@contextmanager
def shadow():
    """A Shadow of every RManager that is used meanwhile."""
    watch, handle = Shadow(), RManager.handle

    def watched(manager, event, now_s):
        watch.before(manager, event)
        commands = handle(manager, event, now_s)
        watch.after(manager, event, commands, now_s)
        return commands

    with patch.object(RManager, "handle", watched):
        yield watch
