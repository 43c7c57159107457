"""The SimPy driver: carries out what the machines decide, in virtual time.

It performs each command, feeds its completion back as an event, prices steps by the *true* cost model and knows the output
lengths. It decides nothing. Before a machine hears of anything else, the iterations its instance has completed are reported.
"""

from collections.abc import Callable, Sequence
from typing import Any

from infsim.chaos import Chaos
from infsim.clockwork import Clockwork, Kind
from infsim.executor import Executor
from infsim.given import GivenExecutor, GivenTimes, GivenTransfers
from infsim.links import Links
from infsim.surroundings import Published
from infsim.transfers import Transfer, Transfers
from perfmodel.cluster import ClusterSpec, Workload, build_machines
from perfmodel.errors import RunError
from perfmodel.journal import STALL_S, Journal, Observer
from perfmodel.messages import (
    DISPATCHER,
    GMANAGER,
    POST_S,
    Address,
    Command,
    CutIterations,
    Event,
    Finish,
    LoanId,
    MessageReceived,
    PeerLost,
    PeerReturned,
    PostReceive,
    ReadEnded,
    ReadStarted,
    RecordMove,
    RequestAborted,
    RequestOutcome,
    Send,
    StartFetch,
    StartIterations,
    StartTransfer,
    SubmitRequest,
    TimerFired,
    TransferDone,
    TransferId,
    machine_name,
)
from perfmodel.records import RunResult

CLOCK_TICK_S = 1e-9
INF = float("inf")


class Simulation:
    """One run of a workload on a cluster. `check` verifies every invariant after every event (tests); `given`: times that were
    measured count instead of those of the true cost model."""

    def __init__(
        self,
        spec: ClusterSpec,
        workload: Workload,
        observer: Observer | None = None,
        check: bool = False,
        given: GivenTimes | None = None,
    ) -> None:
        self.spec, self.workload = spec, workload
        self.machines = build_machines(spec)
        self.journal = Journal(workload, self.machines, self._settle_all, observer, check)
        self.books = self.journal.books
        self.env = Clockwork()
        self.executors = [
            GivenExecutor(spec.truth, given.steps.get(i, {})) if given else Executor(spec.truth)
            for i in range(spec.num_instances)
        ]
        instance = spec.instance
        self.links = Links(spec.nodes, instance.num_gpus, instance.intra_link, instance.inter_link)
        if given:
            self.transfers: Transfers = GivenTransfers(spec, self._pace_bytes_per_s, given.transfers)
        else:
            self.transfers = Transfers(self.links, instance.block_bytes, self._pace_bytes_per_s)
        self._reprices = given is None
        self.published = Published(self.executors, self.links, self._reprice)
        message_s = max(instance.inter_link.latency_s, spec.truth.instance.engine.message_s)
        self.chaos = Chaos(spec.chaos, spec.seed, message_s)
        self.dead: set[Address] = set()
        self._noticed: set[Address] = set()  # dead, and peers have been told
        self._sent: dict[Address, int] = dict.fromkeys(self.machines.addresses(), 0)
        self._armed: dict[Address, float] = {}
        self._reads: list[dict[int, tuple[int, tuple[tuple[LoanId, int], ...]]]] = [{} for _ in self.executors]
        self._progress_s = 0.0
        self._performers = self._performer_of_each_kind()
        self._done = self.env.event()

    def run(self) -> RunResult:
        """Raises RunError, with the story of the machines that are stuck, where the run cannot end."""
        if len(self.workload):
            for req_id, time_s in self.books.first_arrivals():
                self._schedule_arrival(req_id, time_s)
            self._schedule_faults()
            self._schedule_sample(0)
            for machine in self.machines.addresses():
                self._arm(machine)
            self.env.run(until=self._done)
        return self.journal.close(self._basis_s(), self.env.now)

    @property
    def num_events(self) -> int:
        """Callbacks scheduled so far."""
        return sum(self._sent.values())

    @property
    def num_iterations(self) -> int:
        """Iterations completed so far, on all instances."""
        return sum(executor.num_iterations for executor in self.executors)

    # ---- events to machines, commands from them ------------------------------------------------------------------------------
    def _deliver(self, machine: Address, event: Event) -> None:
        """Settle, hand over, and perform what comes back. A lost machine hears nothing."""
        if machine in self.dead:
            return
        if machine >= 0:
            self._settle(machine)
            if isinstance(event, MessageReceived) and isinstance(event.message, SubmitRequest):
                req_id = event.message.request.req_id
                if req_id not in self.machines.rmanagers[machine].rows:
                    self.executors[machine].accept(req_id, self.books.output_tokens[req_id])
        self._handle(machine, event)

    def _settle(self, instance: int) -> None:
        settled = self.executors[instance].settle(self.env.now)
        if settled is not None:
            self._handle(instance, settled)

    def _handle(self, machine: Address, event: Event, at_least_s: float = 0.0) -> None:
        for command in self.journal.handle(machine, event, max(self._local_s(machine), at_least_s)):
            self._perform(machine, command)
        if machine != DISPATCHER and self.spec.placement:
            self._arm(machine)
        if not self.books.num_open:
            self._end_if_at_rest()

    def _perform(self, machine: Address, command: Command) -> None:
        self._performers[type(command)](machine, command)

    def _performer_of_each_kind(self) -> dict[type, Callable[[Address, Any], None]]:
        return {
            StartIterations: self._start_step,
            CutIterations: self._cut_step,
            Send: self._send,
            StartTransfer: self._send_blocks,
            PostReceive: self._receive,
            StartFetch: self._fetch,
            RecordMove: self._note_move,
            Finish: self._note_end,
        }

    def _send(self, sender: Address, command: Send) -> None:
        receiver, event = command.receiver, MessageReceived(sender, command.message)
        for delay_s in self.chaos.arrivals_s(sender, receiver):
            self._at(self.env.now + delay_s, Kind.MESSAGE, receiver, self._deliver, receiver, event)

    def _at(self, time_s: float, kind: Kind, machine: Address, callback: Callable[..., None], *values: Any) -> None:
        self._sent[machine] = counter = self._sent[machine] + 1
        self.env.at(time_s, kind, machine, counter, callback, *values)

    # ---- clocks --------------------------------------------------------------------------------------------------------------
    def _local_s(self, machine: Address) -> float:
        """Now, on a machine's own clock."""
        return self.env.now * self.chaos.clock_rate(machine) if self.chaos.drifts else self.env.now

    def _arm(self, machine: Address) -> None:
        """One timer per machine, at its next deadline."""
        deadline_s = self.machines[machine].next_deadline_s()
        if self.chaos.drifts:
            deadline_s /= self.chaos.clock_rate(machine)
        if deadline_s < self._armed.get(machine, INF):
            self._armed[machine] = deadline_s
            self._at(deadline_s, Kind.TIMER, machine, self._fire, machine, deadline_s)

    def _fire(self, machine: Address, deadline_s: float) -> None:
        if self._armed.get(machine) != deadline_s or machine in self.dead:
            return
        del self._armed[machine]
        if machine >= 0:
            self._settle(machine)
        due_s = self.machines[machine].next_deadline_s()
        # rounding must not make a timer fire before its time, for ever
        if due_s <= self._local_s(machine) + CLOCK_TICK_S:
            self._handle(machine, TimerFired(), due_s)
        else:
            self._arm(machine)

    # ---- iterations ----------------------------------------------------------------------------------------------------------
    def _start_step(self, instance: int, step: StartIterations) -> None:
        executor = self.executors[instance]
        executor.start(step, self.env.now, self.published.around(instance))
        if executor.batch_changed and self.spec.placement:
            self.published.publish(instance, step)
        stale, silent = self._open_reads(instance, step.reads)
        executor.stuck = bool(stale) or silent  # until its loss is noticed, or the refusal is here
        if stale:
            refused_s = self.env.now + 2 * self.spec.instance.inter_link.latency_s
            self._at(refused_s, Kind.ITERATIONS, instance, self._abort_step, instance, step.step, stale)
        if not executor.stuck:
            self._schedule_end(instance)

    def _cut_step(self, instance: int, command: CutIterations) -> None:
        if self.executors[instance].cut():
            self._schedule_end(instance)

    def _schedule_end(self, instance: int) -> None:
        executor = self.executors[instance]
        assert executor.step is not None
        plan = (instance, executor, executor.step.step, executor.end_iterations)
        self._at(executor.end_s, Kind.ITERATIONS, instance, self._end_step, *plan)

    def _end_step(self, instance: int, executor: Executor, step: int, iterations: int) -> None:
        running = executor.step
        if running is None or running.step != step or executor.end_iterations != iterations or executor.stuck:
            return  # a timeout of a step that was cut or has ended: SimPy cannot cancel them
        if self.executors[instance] is not executor:
            return  # the instance was lost
        self._progress_s = self.env.now
        if self.books.observer:
            self.books.observer.span(instance, executor.start_s, self.env.now, running)
        self._handle(instance, executor.end())
        self._note_idle(instance)

    def _abort_step(self, instance: int, step: int, stale: tuple[LoanId, ...]) -> None:
        executor = self.executors[instance]
        if executor.step is not None and executor.step.step == step:
            self._close_reads(instance)
            self._handle(instance, executor.abort(stale))
            self._note_idle(instance)

    def _note_idle(self, instance: int) -> None:
        if self.executors[instance].step is None and self.spec.placement:
            self._close_reads(instance)
            self.published.publish(instance, None)

    def _reprice(self, instance: int) -> None:
        """What a running step depends on has changed: end it at the next boundary; the next one is priced anew."""
        if instance in self.dead or not self._reprices:
            return
        self._settle(instance)
        if self.executors[instance].cut():
            self._schedule_end(instance)

    # ---- reads ---------------------------------------------------------------------------------------------------------------
    def _open_reads(self, debtor: int, reads: Sequence[tuple[LoanId, int]]) -> tuple[tuple[LoanId, ...], bool]:
        """Post the queries of a step at its creditors; reads that go on unchanged stay open.

        Returns the loans that are not served, and whether a peer is silent because it has just been lost.
        """
        if not reads and not self._reads[debtor]:
            return (), False
        wanted: dict[int, list[tuple[LoanId, int]]] = {}
        for loan, num_blocks in reads:
            wanted.setdefault(loan.creditor, []).append((loan, num_blocks))
        stale: tuple[LoanId, ...] = ()
        silent = False
        before, mine = self._reads[debtor], {}
        for creditor in sorted(wanted):
            entries = tuple(wanted[creditor])
            if creditor in before and before[creditor][1] == entries:
                mine[creditor] = before.pop(creditor)
            elif creditor in self.dead and creditor not in self._noticed:
                silent = True
            elif not self._lives(creditor, entries[0][0].creditor_incarnation):
                stale += tuple(loan for loan, _ in entries)
            else:
                read = self._new_read(debtor)
                refused = self._read(debtor, creditor, read, entries)
                stale += refused
                if not refused:
                    mine[creditor] = (read, entries)
        self._reads[debtor] = mine
        for creditor, (read, _) in before.items():
            self._deliver(creditor, ReadEnded(debtor, read))
        return stale, silent

    def _new_read(self, debtor: int) -> int:
        self._sent[debtor] += 1
        return self._sent[debtor]

    def _read(
        self, debtor: int, creditor: int, read: int, entries: tuple[tuple[LoanId, int], ...]
    ) -> tuple[LoanId, ...]:
        """Ask a creditor to serve a read; returns the loans it refuses."""
        self._settle(creditor)
        refused, commands = self.journal.ask(creditor, ReadStarted(debtor, read, entries), self._local_s(creditor))
        for command in commands:
            self._perform(creditor, command)
        return refused

    def _close_reads(self, debtor: int) -> None:
        reads, self._reads[debtor] = self._reads[debtor], {}
        for creditor, (read, _) in reads.items():
            self._deliver(creditor, ReadEnded(debtor, read))

    # ---- transfers -----------------------------------------------------------------------------------------------------------
    def _pace_bytes_per_s(self, debtor: int, tokens_per_iteration: int) -> float:
        """Rate of `tokens_per_iteration` at the debtor's current pace; unlimited where it is idle or not paced."""
        iteration_s = self.published.iteration_s(debtor)
        if not tokens_per_iteration or not iteration_s:
            return INF
        instance = self.spec.instance
        return tokens_per_iteration * instance.block_bytes / instance.block_tokens / iteration_s

    def _send_blocks(self, debtor: int, command: StartTransfer) -> None:
        self.transfers.send(debtor, command, self.env.now)
        self._at(self.env.now + POST_S, Kind.TRANSFER, debtor, self._give_up, command.transfer)

    def _receive(self, creditor: int, command: PostReceive) -> None:
        self._complete_transfers()
        transfer = self.transfers.receive(creditor, command, self.env.now)
        if transfer is None:
            done = TransferDone(command.transfer, command.loan, ok=False)
            self._at(self.env.now, Kind.TRANSFER, creditor, self._deliver, creditor, done)
        else:
            self._transfers_changed(transfer)

    def _fetch(self, debtor: int, command: StartFetch) -> None:
        read = self._new_read(debtor)
        dead = command.peer in self.dead
        current = self.machines.rmanagers[command.peer].incarnation == command.loan.creditor_incarnation
        entries = ((command.loan, command.first + len(command.blocks)),)
        refused = dead or not current or bool(self._read(debtor, command.peer, read, entries))
        if refused:
            done = TransferDone(command.transfer, command.loan, ok=False, stale=True)
            delay_s = 2 * self.spec.instance.inter_link.latency_s
            self._at(self.env.now + delay_s, Kind.TRANSFER, debtor, self._deliver, debtor, done)
            return
        self._complete_transfers()
        self._transfers_changed(self.transfers.fetch(debtor, command, read, self.env.now))

    def _transfers_changed(self, transfer: Transfer) -> None:
        self._progress_s = self.env.now
        for instance in (transfer.src, transfer.dst):
            self.published.publish_copies(instance)
        self._schedule_completion()

    def _schedule_completion(self) -> None:
        head = self.transfers.links.next_completion()
        if head is not None:
            self._at(head[0], Kind.TRANSFER, GMANAGER, self._complete_transfers)

    def _complete_transfers(self) -> None:
        head = self.transfers.links.next_completion()
        if head is None or head[0] > self.env.now:
            return
        for transfer in self.transfers.take_complete(self.env.now):
            latency_s = self.links.spec(transfer.src, transfer.dst).latency_s
            self._at(self.env.now + latency_s, Kind.TRANSFER, transfer.dst, self._end_transfer, transfer, True)
            self._transfers_changed(transfer)

    def _end_transfer(self, transfer: Transfer, ok: bool) -> None:
        self._progress_s = self.env.now
        done = TransferDone(transfer.transfer, transfer.loan, ok)
        if transfer.read is not None:
            self._deliver(transfer.src, ReadEnded(transfer.dst, transfer.read))
            self._deliver(transfer.dst, done)
            return
        if transfer.flowing and self._lives(transfer.dst, transfer.loan.creditor_incarnation):
            self._deliver(transfer.dst, done)
        if self._lives(transfer.src, transfer.loan.debtor_incarnation):
            self._deliver(transfer.src, done)

    def _lives(self, instance: int, incarnation: int) -> bool:
        return instance not in self.dead and self.machines.rmanagers[instance].incarnation == incarnation

    def _give_up(self, transfer: TransferId) -> None:
        held = self.transfers.give_up(transfer)
        if held is not None and self._lives(held.src, held.loan.debtor_incarnation):
            self._deliver(held.src, TransferDone(transfer, held.loan, ok=False))

    # ---- faults --------------------------------------------------------------------------------------------------------------
    def _schedule_faults(self) -> None:
        params = self.chaos.params
        for time_s, machine, back_s in params.kill:
            self._at(time_s, Kind.SAMPLE, machine, self._kill, machine)
            if back_s < INF:
                noticed_s = time_s + params.detect_s  # it is not back before its loss is known
                self._at(max(back_s, noticed_s), Kind.SAMPLE, machine, self._return, machine)
        for time_s, machine in params.accuse:
            self._at(time_s, Kind.SAMPLE, machine, self._accuse, machine)

    def _accuse(self, machine: int) -> None:
        """A false death: all are told that a live instance is lost, and after a while that it is not."""
        if machine not in self.dead:
            self._tell_all(machine, PeerLost(machine))
            self._at(self.env.now + self.chaos.params.detect_s, Kind.SAMPLE, machine, self._acquit, machine)

    def _acquit(self, machine: int) -> None:
        if machine not in self.dead:
            self._tell_all(machine, PeerReturned(machine, self.machines.rmanagers[machine].incarnation))

    def _kill(self, machine: Address) -> None:
        self.books.note(self.env.now, "kill", who=machine_name(machine))
        if machine >= 0:
            self._settle(machine)
            for debtor, executor in enumerate(self.executors):
                if debtor != machine and machine in self._reads[debtor]:
                    self._settle(debtor)
                    executor.stuck = True
        self.dead.add(machine)
        if machine >= 0:
            self._complete_transfers()
            lost = self.transfers.lose(machine, self.env.now)
            self._schedule_completion()
            reads, self._reads[machine] = self._reads[machine], {}
            self.executors[machine].step = None
            self.executors[machine] = self.published.replace(machine, Executor(self.spec.truth))
            noticed_s = self.env.now + self.chaos.params.detect_s
            self._at(noticed_s, Kind.SAMPLE, machine, self._detect, machine, lost, reads)

    def _detect(
        self, machine: int, lost: list[Transfer], reads: dict[int, tuple[int, tuple[tuple[LoanId, int], ...]]]
    ) -> None:
        """The transport has noticed: broken transfers and reads end, waiting iterations are given up, and peers are told."""
        self._noticed.add(machine)
        for transfer in lost:
            self._end_transfer(transfer, ok=False)
            self._transfers_changed(transfer)
        for creditor, (read, _) in reads.items():
            self._deliver(creditor, ReadEnded(machine, read))
        for debtor, executor in enumerate(self.executors):
            if executor.stuck and executor.step is not None and debtor not in self.dead:
                self._abort_step(debtor, executor.step.step, ())
        self._tell_all(machine, PeerLost(machine))

    def _tell_all(self, about: Address, event: Event) -> None:
        for machine in self.machines.addresses():
            if machine != about:
                self._deliver(machine, event)

    def _return(self, machine: Address) -> None:
        self._armed.pop(machine, None)
        self.machines.restart(machine, self._local_s(machine))
        self.books.note(self._local_s(machine), "return", who=machine_name(machine))
        self.dead.discard(machine)
        self._noticed.discard(machine)
        self._arm(machine)
        if machine >= 0:
            self._tell_all(machine, PeerReturned(machine, self.machines.rmanagers[machine].incarnation))

    # ---- requests ------------------------------------------------------------------------------------------------------------
    def _schedule_arrival(self, req_id: int, time_s: float) -> None:
        self._at(time_s, Kind.ARRIVAL, DISPATCHER, self._arrive, req_id)

    def _arrive(self, req_id: int) -> None:
        self._progress_s = self.env.now
        event, following = self.books.arrive(req_id, self.env.now)
        if following:
            self._schedule_arrival(*following)
        self._deliver(DISPATCHER, event)
        if self.workload.patience_s is not None and self.workload.patience_s[req_id] < INF:
            leaves_s = self.env.now + float(self.workload.patience_s[req_id])
            self._at(leaves_s, Kind.ARRIVAL, DISPATCHER, self._deliver, DISPATCHER, RequestAborted(req_id))

    def _note_move(self, debtor: int, command: RecordMove) -> None:
        self.books.collector.add_move(command, self.spec.instance.block_bytes)

    def _note_end(self, dispatcher: Address, command: Finish) -> None:
        outcome = command.outcome
        if outcome.instance is not None and self.chaos.params.drift_frac:
            outcome = _on_true_time(outcome, self.chaos.clock_rate(outcome.instance))
        following = self.books.end(outcome, self.env.now)
        if following:
            self._schedule_arrival(*following)

    def _end_if_at_rest(self) -> None:
        live = [m for i, m in enumerate(self.machines.rmanagers) if i not in self.dead]
        if not self._done.triggered and all(manager.at_rest for manager in live):
            self._done.succeed()

    # ---- looking on ----------------------------------------------------------------------------------------------------------
    def _settle_all(self) -> None:
        for instance in range(self.spec.num_instances):
            if instance not in self.dead:
                self._settle(instance)

    def _schedule_sample(self, count: int) -> None:
        self._at(count * self.spec.sample_s, Kind.SAMPLE, DISPATCHER, self._sample_and_again, count)

    def _sample_and_again(self, count: int) -> None:
        self.journal.sample(self.env.now)
        self._check_progress()
        self._schedule_sample(count + 1)

    def _check_progress(self) -> None:
        busy = any(executor.step is not None for executor in self.executors) or len(self.transfers) > 0
        if busy or self.books.waits_for_arrivals or self.env.now - self._progress_s < STALL_S:
            return
        raise RunError(self.journal.story(f"{STALL_S:g} s of virtual time"))

    def _basis_s(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for executor in self.executors:
            for name, seconds in executor.basis_s.items():
                sums[name] = sums.get(name, 0.0) + seconds
        return sums


def _on_true_time(outcome: RequestOutcome, rate: float) -> RequestOutcome:
    """An outcome's times from a clock of that rate."""
    names = ("received_s", "admitted_s", "first_token_s", "finish_s", "preempted_s", "remote_wait_s")
    times: dict[str, Any] = {}
    for name in names:
        value = getattr(outcome, name)
        times[name] = None if value is None else value / rate
    return outcome._replace(**times)
