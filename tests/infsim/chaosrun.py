"""How a chaos case is run: nudges, invariants, contents followed, and what must hold when it has ended."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
from chaoscase import INSTANCES, NEVER, SLOW_SPAN_S, SPAN_S
from shadow import shadow

from infsim.clockwork import Kind
from infsim.driver import Simulation
from perfmodel import debtor
from perfmodel.errors import RunError
from perfmodel.loan import Cause, State
from perfmodel.messages import (
    DISPATCHER,
    GMANAGER,
    MessageReceived,
    MoveKvCache,
    PeerLost,
    Preempt,
    RecordMove,
    Send,
    TimerFired,
    machine_name,
)

CALM_SPANS = 5  # spans after which messages arrive once and in time
END_SPANS = 80  # spans after which a run counts as endless


# ---- what may happen at any time ---------------------------------------------------------------------------------------------
def ask_back(sim, manager, number):
    """A creditor wants to have that many more of its blocks back."""
    kept = sum(loan.keep for loan in manager.creditor.loans.values() if not loan.capacity)
    if kept:
        for command in manager.creditor.reclaim(manager.pool.total - kept + number):
            sim._perform(manager.instance, command)
    return kept > 0


def take_back(sim, manager, number):
    """A debtor takes one of its loans back: just before its step ends, or every fourth time now."""
    held = [loan for loan in manager.borrower.debtor.loans.values() if loan.state == State.HELD and not loan.fetch]
    if held:
        executor, loan = sim.executors[manager.instance], held[number % len(held)]
        wait_s = 0.95 * max(0.0, executor.end_s - sim.env.now) if number % 4 and executor.step else 0.0
        sim._at(sim.env.now + wait_s, Kind.SAMPLE, DISPATCHER, partial(fetch, sim, manager, loan, number))
    return bool(held)


def fetch(sim, manager, loan, number):
    """Begin, and where the step ends sooner preempt its request; as soon as the loan is closing, fate strikes once more."""
    if not is_there(sim, manager, loan):
        return
    sim._settle(manager.instance)
    free = manager.pool.free
    if manager.borrower.move_back(loan):
        manager._adjust_step(free)  # as after every event of its own
        sim.fates[loan.id] = partial(strike, sim, manager, loan, number)
        sim._deliver(manager.instance, TimerFired())
        if number % 4:
            order_preemption(sim, manager, loan.req_id)


def is_there(sim, manager, loan):
    """The debtor lives, and has the loan."""
    lives = manager.instance not in sim.dead and sim.machines.rmanagers[manager.instance] is manager
    return lives and loan.id in manager.borrower.debtor.loans


def strike(sim, manager, loan, number):
    """A loan is closing, and a step or a fetch still uses it: its creditor asks for a block of it, is said to be lost, or its
    request starts again."""
    if not is_there(sim, manager, loan):
        return
    if number % 3 == 0:
        shorten(sim, loan)
    elif number % 3 == 1 and (sim.chaos.params.accuse or sim.chaos.params.kill):
        sim._deliver(manager.instance, PeerLost(loan.id.creditor))
    else:
        order_preemption(sim, manager, loan.req_id)


def shorten(sim, loan):
    """A creditor wants one block of a loan back."""
    lender = sim.machines.rmanagers[loan.id.creditor].creditor
    lent = lender.loans.get(loan.id)
    if lent is not None and lent.keep and loan.id.creditor not in sim.dead:
        lent.keep -= 1
        sim._perform(loan.id.creditor, lender.answer(loan.id.debtor))


def preempt(sim, manager, number):
    """The gManager preempts a request that has borrowed."""
    borrowed = list(manager.borrower.debtor.by_request)
    if borrowed:
        order_preemption(sim, manager, borrowed[number % len(borrowed)])
    return bool(borrowed)


def order_preemption(sim, manager, req_id):
    if GMANAGER not in sim.dead and manager.instance not in sim.dead:
        order = Preempt(sim.machines.gmanager._next_order(), manager.reporter._seq, req_id)
        sim._deliver(manager.instance, MessageReceived(GMANAGER, order))


NUDGES = {"ask back": ask_back, "take back": take_back, "preempt": preempt}


def nudge(sim, what, instance, number):
    """The first live instance from `instance` on to which it can happen."""
    for i in range(instance, instance + INSTANCES):
        if i % INSTANCES not in sim.dead:
            sim._settle(i % INSTANCES)
            if NUDGES[what](sim, sim.machines.rmanagers[i % INSTANCES], number):
                return


# ---- what has happened -------------------------------------------------------------------------------------------------------
HAPPENINGS = (
    "capacity committed",  # part of a prompt, or of a row that could not grow, is elsewhere
    "capacity refused",
    "growth ordered",
    "preemption ordered",  # of the youngest, for an older request that cannot go on
    "reclaim committed",
    "back committed",
    "gmanager killed with a grant outstanding",
)


class Happenings:
    """Observer that counts them."""

    def __init__(self, sim, counts):
        self.sim, self.counts = sim, counts

    def event(self, t_s, machine, event):
        order = event.message if isinstance(event, MessageReceived) else None
        if isinstance(order, MoveKvCache) and order.req_id in self.sim.machines[machine].borrower.suspended:
            self.counts["growth ordered"] += 1

    def command(self, t_s, machine, command):
        match command:
            case RecordMove(kind=kind, outcome=outcome):
                self.counts[f"{kind} {outcome}"] += 1
            case Send(message=Preempt()):
                self.counts["preemption ordered"] += 1

    def note(self, t_s, what, **values):
        killed = what == "kill" and values["who"] == machine_name(GMANAGER)
        if killed and self.sim.machines.gmanager._granting is not None:
            self.counts["gmanager killed with a grant outstanding"] += 1

    def span(self, *_):
        pass


# ---- runs --------------------------------------------------------------------------------------------------------------------
def simulation(case, cluster, workload):
    """The run of a case, about to begin."""
    spec = cluster(num_instances=INSTANCES, scheduler=case.scheduler, chaos=case.chaos, seed=case.seed, **case.options)
    far = replace(spec.instance, inter_link=replace(spec.instance.inter_link, bytes_per_s=case.far_bytes_per_s))
    load = workload(case.requests, rate_rps=case.rate_rps, seed=case.seed)
    if case.patience_s:
        load = replace(load, patience_s=np.array(case.patience_s))
    sim = Simulation(replace(spec, instance=far), load, check=True)
    sim.fates = {}  # loan → what strikes it when it is closing
    for at_s, *what in case.nudges:
        sim._at(at_s, Kind.SAMPLE, DISPATCHER, partial(nudge, sim, *what))
    span_s = SLOW_SPAN_S if case.slow else SPAN_S
    sim._at(CALM_SPANS * span_s, Kind.SAMPLE, DISPATCHER, partial(calm, sim))
    sim._at(END_SPANS * span_s, Kind.SAMPLE, DISPATCHER, give_up)
    return sim


def calm(sim):
    """From now on messages arrive once and in time; what goes wrong for ever is not the messages' fault."""
    sim.chaos.params = replace(sim.chaos.params, delay_s=0.0, reorder=0.0, duplicate=0.0, loss=0.0)


def give_up():
    raise RunError("the run does not end")


def run_case(case, cluster, workload, counts=None):
    """Run it, with every invariant after every event, data followed, and the end checked. Failures name the seed.

    counts: takes "state cause fault" of every transition and every class of fault that was present, and what has happened. Loans
    that nudges have taken back are struck once more while they are closing.
    """
    transition, settle = debtor.transition, debtor.Debtor.settle
    sim = simulation(case, cluster, workload)
    if counts is not None:
        sim.books.observer = Happenings(sim, counts)

    def watched(before, cause, after):
        transition(before, cause, after)
        assert cause != Cause.LOST or before == State.ASKED or not case.lossless, f"a loan that was {before} is lost"
        if counts is not None:
            counts.update(f"{before} {cause} {fault}" for fault in case.faults(sim.env.now, sim.workload))

    def settled(self, in_use):
        settle(self, in_use)
        for loan in self.loans.values():
            if loan.state == State.CLOSING and loan.id in sim.fates:
                sim._at(sim.env.now, Kind.SAMPLE, DISPATCHER, sim.fates.pop(loan.id))

    try:
        with (
            shadow() as watch,
            patch.object(debtor, "transition", watched),
            patch.object(debtor.Debtor, "settle", settled),
        ):
            result = sim.run()
        check_end(case, sim, result)
        if case.lossless:
            assert not watch.refused, f"stale without a crash or the end of a lease: {watch.refused[0]}"
    except Exception as error:
        raise AssertionError(f"seed {case.seed}: {type(error).__name__}: {error}") from error
    return result


def check_end(case, sim, result):
    """Every request has one status, and where it has not finished a reason; nothing is borrowed, lent, pinned or on its way."""
    assert result.requests["req_id"] == list(range(len(case.requests)))
    for req_id, status, reason in zip(*(result.requests[name] for name in ("req_id", "status", "reason")), strict=True):
        assert status in ("finished", "failed", "rejected", "aborted"), f"request {req_id}: {status}"
        assert (status == "finished") == (reason == ""), f"request {req_id}: {status} {reason!r}"
        may_abort = case.patience_s is not None and case.patience_s[req_id] < NEVER
        assert status != "aborted" or may_abort, f"request {req_id} was aborted by nobody"
    sim.machines.check_invariants()
    for instance, manager in enumerate(sim.machines.rmanagers):
        state = manager.sample()._asdict()
        total = manager.pool.total
        wanted = {**dict.fromkeys(state, 0), "free_blocks": total}
        if instance not in sim.dead:
            assert state == wanted, f"instance {instance} at rest: {state}"
            assert not any(map(manager.pool.is_pinned, range(total))), f"instance {instance} has pins at rest"
