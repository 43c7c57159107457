"""Scenario S11: a request aborted or preempted, an instance or the gManager killed, at every state of a move. After the leases
every block is free again, and the other requests have given their tokens. And faults of the driver that chaos has found."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from chaoscase import QUIET, Case
from chaosrun import check_end, simulation
from scenarios import long_iterations
from shadow import shadow

from infsim.clockwork import Kind
from infsim.executor import Executor
from perfmodel.loan import State
from perfmodel.messages import (
    DISPATCHER,
    GMANAGER,
    Chunk,
    MessageReceived,
    Preempt,
    RequestAborted,
    StartIterations,
)
from perfmodel.policies.placement import NoPlacement
from perfmodel.pricing import Surroundings
from perfmodel.view import Move, SchedulerParams

TIMERS = SchedulerParams(lease_s=2.5, renew_s=0.4, period_s=0.5, heartbeat_s=0.5, move_tokens_per_iteration=0)
BACK_S = 3.0  # a killed machine returns after so long
SHORT = [(64, 150)] * 6
OTHERS = range(1, 7)  # requests that are not the one whose blocks move


class LendOnce:
    """Orders 20 blocks of request 0 to the instance after its own."""

    def __init__(self):
        self.done = False

    def plan(self, view):
        if self.done:
            return []
        found = [
            (i, m) for i, load in view.loads.items() for m in load.longest if m.req_id == 0 and m.movable_blocks >= 20
        ]
        self.done = bool(found)
        return [Move(0, src, (src + 1) % len(view.loads), 20) for src, _ in found]


def ask_back(sim):
    """A creditor that has lent starts to want everything back."""
    for creditor, manager in enumerate(sim.machines.rmanagers):
        if any(loan.stored == loan.num_blocks == 20 for loan in manager.creditor.loans.values()):
            for command in manager.creditor.reclaim(manager.pool.total):
                sim._perform(creditor, command)


STATES = {
    "asked": lambda loan: loan.state == State.ASKED,
    "granted": lambda loan: loan.state == State.GRANTED and loan.transfer is None,
    "storing": lambda loan: loan.state == State.GRANTED and loan.transfer is not None,
    "held": lambda loan: loan.state == State.HELD and loan.fetch is None,
    "fetching": lambda loan: loan.fetch is not None,
    "closing": lambda loan: loan.state == State.CLOSING,
}
KINDS = {"throughput": (1000, 300), "capacity": (2000, 60)}
NEVER = {
    "throughput": ["granted"],  # what is granted is sealed, and sent at once
    "capacity": ["fetching", "closing"],  # not asked back: whole prompts depend on them
}


def abort(sim, loan):
    sim._deliver(DISPATCHER, RequestAborted(0))


def preempt(sim, loan):
    order = Preempt(sim.machines.gmanager._next_order(), sim.machines.rmanagers[loan.id.debtor].reporter._seq, 0)
    sim._deliver(loan.id.debtor, MessageReceived(GMANAGER, order))


def kill(machine, sim, loan):
    sim._kill(machine(loan))
    sim._at(sim.env.now + BACK_S, Kind.SAMPLE, machine(loan), partial(sim._return, machine(loan)))


FAULTS = {
    "abort": abort,
    "preempt": preempt,
    "kill debtor": partial(kill, lambda loan: loan.id.debtor),
    "kill creditor": partial(kill, lambda loan: loan.id.creditor),
    "kill gmanager": partial(kill, lambda loan: GMANAGER),
}


class Watch:
    """Looks at request 0's loans after each command; strikes once, when one of them is in the wanted state."""

    def __init__(self, sim, state, strike):
        self.sim, self.is_wanted, self.strike = sim, STATES[state], strike
        self.fetches, self.struck = state in ("fetching", "closing"), False

    def event(self, t_s, machine, event):
        pass

    def span(self, machine, start_s, end_s, step):
        pass

    def note(self, t_s, what, **values):
        pass

    def command(self, t_s, machine, command):
        if self.struck:
            return
        loans = [loan for m in self.sim.machines.rmanagers for loan in m.borrower.debtor.by_request.get(0, ())]
        if self.fetches and isinstance(command, StartIterations) and any(STATES["held"](loan) for loan in loans):
            self.fetches = False
            self._soon(ask_back, self.sim)
        found = next((loan for loan in loans if self.is_wanted(loan)), None)
        if found is not None:
            self.struck = True
            self._soon(self.strike, self.sim, found)

    def _soon(self, function, *values):
        """Once what is being carried out is done."""
        self.sim._at(self.sim.env.now, Kind.ITERATIONS, DISPATCHER, partial(function, *values))


def cases():
    for kind in KINDS:
        for state in STATES:
            if state in NEVER[kind]:
                continue
            for fault in FAULTS:
                yield kind, state, fault


@pytest.mark.parametrize(("kind", "state", "fault"), list(cases()))
def test_a_fault_at_every_state_of_a_move(cluster, workload, kind, state, fault):
    placement = LendOnce if kind == "throughput" else NoPlacement
    options = {"num_blocks": 100, "placement": placement, "nodes": (0, 1, 2)}
    case = Case(0, QUIET, TIMERS, (KINDS[kind], *SHORT), rate_rps=50.0, options=options)
    sim = simulation(case, cluster, workload)
    sim.books.observer = watch = Watch(sim, state, FAULTS[fault])
    with shadow():
        result = sim.run()
    assert watch.struck, f"no loan was ever {state}"
    status = result.requests["status"]
    assert status[0] == ("aborted" if fault == "abort" else "finished")
    assert {status[i] for i in OTHERS} == {"finished"}
    check_end(replace(case, patience_s=(1.0,) * 7 if fault == "abort" else None), sim, result)


@pytest.mark.parametrize("seed", range(2))
def test_loans_outlive_iterations_ten_times_longer_than_a_lease(cluster, workload, seed):
    case = long_iterations(seed)
    sim = simulation(case, cluster, workload)
    with shadow() as watch:
        result = sim.run()
    check_end(case, sim, result)
    assert result.makespan_s > 100 * case.scheduler.lease_s
    assert "committed" in result.moves["outcome"]
    assert "lost" not in result.moves["outcome"]
    assert (watch.refused, sum(result.requests["num_preemptions"])) == ([], 0)


# ---- the driver --------------------------------------------------------------------------------------------------------------
def test_a_new_attempt_has_all_its_tokens_to_give(cluster):
    """Found while reading: what an aborted attempt had still to give was taken for that of the next one."""
    executor = Executor(cluster().truth)
    executor.accept(7, 100)
    executor._finish_at[7] = 60
    executor.accept(7, 100)
    nothing = StartIterations(1, 0, 0, 0, (Chunk(8, 10, 0, last=False),), 1, joined=(), left=(7,))
    executor.start(nothing, 0.0, Surroundings(0.0, lambda peer: None, lambda peer: 0.0))
    assert executor.left[7] == 100


def test_clients_that_go_away_end_their_requests_and_no_others(cluster, workload):
    load = replace(workload([(200, 400)] * 10), patience_s=np.array([0.5, np.inf] * 5))
    case = Case(0, requests=((200, 400),) * 10, patience_s=tuple(load.patience_s), options={"placement": LendOnce})
    sim = simulation(case, cluster, workload)
    result = sim.run()
    assert result.requests["status"] == ["aborted", "finished"] * 5
    check_end(case, sim, result)
