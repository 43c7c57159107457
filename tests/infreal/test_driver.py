"""Exactness end to end: whatever is placed, moved, preempted or taken back, the tokens and logits are a single instance's.

Every free block of every pool holds NaN, so a block that is freed under its reader, or read without having been filled, shows.
"""

from dataclasses import replace

import pytest
from pool_tools import QUICK, Checked, Restless, cluster, workload

from perfmodel.borrower import Borrower
from perfmodel.loan import State
from perfmodel.messages import GMANAGER, MessageReceived, PeerLost, Preempt, TimerFired

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_single_instance_serves_a_batch():
    Checked(cluster(1, 60, placement=None), workload([(30, 12), (7, 20), (41, 1)], gap_s=0.01)).finish().assert_exact()


@pytest.mark.parametrize("num_instances", [2, 3, 4])
@pytest.mark.parametrize("token_budget", [16, 512])
def test_a_prompt_that_spans_all_instances(num_instances, token_budget):
    """Chunks are computed at home, sealed blocks stream away, and later chunks and decode rows read them there."""
    spec = cluster(num_instances, 16, token_budget=token_budget)
    run = Checked(spec, workload([(num_instances * 16 * 4 - 40, 24)])).finish()
    run.assert_exact()
    assert run.result.requests["remote_tokens_max"][0] >= (num_instances - 1) * 16 * 4 - 40
    assert run.count("capacity") >= num_instances - 1


@pytest.mark.parametrize("macro", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_moves_in_mid_decode(seed, macro):
    load = workload([(20 + 7 * seed + 5 * i, 60) for i in range(6)], gap_s=0.02)
    run = Checked(cluster(2 + seed, 120, placement=Restless, macro=macro), load).finish()
    run.assert_exact()
    assert run.count("throughput") >= 5
    assert sum(tokens > 0 for tokens in run.result.requests["remote_tokens_max"]) >= 4


def test_moves_of_rows_that_share_a_creditor():
    """Batches of which some rows have KV elsewhere, some on two creditors, and some nowhere else."""
    load = workload([(40, 80), (4, 80), (90, 80), (12, 80)])
    run = Checked(cluster(3, 200, placement=Restless, dispatch=ToTheFirst), load).finish()
    run.assert_exact()
    assert run.count("throughput") >= 6


class ToTheFirst:
    """Everything to instance 0."""

    def choose(self, view, request):
        return 0


def test_preempted_requests_resume():
    run = Checked(cluster(1, 24, placement=None), workload([(30, 40), (20, 40), (25, 30)], gap_s=0.01)).finish()
    run.assert_exact()
    assert sum(run.result.requests["num_preemptions"]) >= 2


@pytest.mark.parametrize("num_instances", [2, 3])
def test_preempted_requests_with_blocks_elsewhere_resume(num_instances):
    run = Checked(cluster(num_instances, 60, placement=Restless), workload([(60, 40), (50, 40), (30, 60)], gap_s=0.01))
    for i in range(6):
        run.at(0.4 + 0.1 * i, preempt_a_borrower, i)
    run.finish().assert_exact()
    assert sum(run.result.requests["num_preemptions"]) >= 2


def preempt_a_borrower(run, number):
    for manager in run.run.machines.rmanagers:
        borrowers = list(manager.borrower.debtor.by_request)
        if borrowers:
            order = run.run.machines.gmanager._next_order()
            preempt = Preempt(order, manager.reporter._seq, borrowers[number % len(borrowers)])
            run.run._handle(manager.instance, MessageReceived(GMANAGER, preempt))
            return


@pytest.mark.parametrize("num_blocks", [40, 120])
def test_blocks_that_are_wanted_back(num_blocks):
    """A creditor asks for its memory: the debtor fetches the blocks, or recomputes where it has no room."""
    run = Checked(cluster(3, num_blocks, placement=Restless), workload([(40 + 9 * i, 60) for i in range(4)]))
    for i in range(12):
        run.at(0.5 + 0.1 * i, Checked.ask_back, i % 3)
    run.finish().assert_exact()
    assert run.count("reclaim") > 0 or sum(run.result.requests["num_preemptions"]) > 0
    assert num_blocks == 40 or run.count("reclaim") > 0


def test_loans_that_are_taken_back():
    run = Checked(cluster(2, 120, placement=Restless), workload([(40, 90), (60, 90)]))
    for i in range(10):
        run.at(0.5 + 0.1 * i, take_back)
    run.finish().assert_exact()
    assert run.count("back") > 0


def take_back(run):
    for manager in run.run.machines.rmanagers:
        held = [loan for loan in manager.borrower.debtor.loans.values() if loan.state == State.HELD and not loan.fetch]
        if held and manager.borrower.move_back(held[0]):
            run.run._handle(manager.instance, TimerFired())


@pytest.mark.parametrize("how", ["stale", "lost"])
def test_requests_whose_loan_is_gone_are_recomputed(how):
    run = Checked(cluster(3, 120, placement=Restless), workload([(40, 60), (60, 60)]))
    for i in range(4):
        run.at(0.5 + 0.15 * i, {"stale": forget_loans, "lost": lose_creditors}[how])
    run.finish().assert_exact()
    assert sum(run.result.requests["num_preemptions"]) > 0


def forget_loans(run):
    """A creditor has no loan any more, and nobody has told its debtor."""
    for manager in run.run.machines.rmanagers:
        for loan in list(manager.creditor.loans.values()):
            if loan.stored and not loan.receiving:
                manager.creditor._close(loan)
                return


def lose_creditors(run):
    for manager in run.run.machines.rmanagers:
        for creditor in {loan.id.creditor for loan in manager.borrower.debtor.loans.values()}:
            run.run._handle(manager.instance, PeerLost(creditor))


def test_a_busy_pool_with_prompts_longer_than_an_instance():
    """Everything at once: short and long prompts, growth, preemption, capacity and throughput moves, lent memory asked back."""
    lengths = [(30, 60)] * 4 + [(150, 40), (20, 60), (190, 20), (25, 70)]
    run = Checked(cluster(3, 40, placement=Restless), workload(lengths, gap_s=0.05))
    for i in range(10):
        run.at(0.6 + 0.2 * i, Checked.ask_back, i % 3)
    run.finish().assert_exact()
    assert run.count("capacity") > 0


def test_long_iterations_do_not_end_leases():
    """Moves are committed in the midst of iterations that last longer than everything else."""
    run = Checked(
        cluster(2, 120, placement=Restless, scheduler=replace(QUICK, move_tokens_per_iteration=64)), LONG_ROWS
    )
    run.run.clock._tick_s = 0.02
    run.finish().assert_exact()
    assert run.count("throughput") >= 3


LONG_ROWS = workload([(40, 60), (60, 60), (20, 60)])


def test_without_a_fence_the_poison_shows(monkeypatch):
    """The guard can fail: blocks freed while a step on the old placement runs are read as NaN."""

    def let_go(self, row, blocks):
        self.owner.pool.release(blocks)

    monkeypatch.setattr(Borrower, "_let_go", let_go)
    run = Checked(
        cluster(2, 120, placement=Restless, scheduler=replace(QUICK, move_tokens_per_iteration=64)), LONG_ROWS
    )
    run.run.clock._tick_s = 0.02
    run.finish()
    with pytest.raises(AssertionError, match="request 0"):
        run.assert_exact()
