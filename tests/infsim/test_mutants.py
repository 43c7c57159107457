"""Every rule of the loan protocol is guarded: without it some scenario fails, and with it all of them hold."""

from functools import partial
from unittest.mock import patch

import pytest
from chaosrun import run_case
from mutants import MUTANTS
from scenarios import crossing, cut_short, far, late, orphans, prompts, quiet, restarts, tight

from perfmodel.blocks import BlockPool
from perfmodel.creditor import Creditor
from perfmodel.messages import DebtorLedger, LoanId, ReadStarted, RefuseRead, Store, TransferDone, TransferId
from perfmodel.view import SchedulerParams

CAUGHT_BY = {  # the family of cases that catches it, and within how many seeds
    "no fence": (crossing, 8),
    "no pin on serve": (crossing, 8),
    "no pin on receive": (cut_short, 30),
    "ledger before the fence": (crossing, 8),
    "pledges not counted": (far, 8),
    "commit before stored": (quiet, 8),
    "seq not compared": (late, 40),
    "old loan re-created": (late, 150),
    "no renewal by the creditor": (quiet, 8),
    "no renewal by the debtor": (quiet, 8),
    "headroom lent": (tight, 8),
    "no lent cap": (tight, 8),
    "no lease": (orphans, 8),
    "same incarnation after restart": (restarts, 16),
    "half-granted capacity": (prompts, 40),
    "no order expiry at the gManager": (prompts, 8),
    "no order expiry at the debtor": (late, 40),
}
FAMILIES = (crossing, cut_short, far, late, orphans, prompts, quiet, restarts, tight)


def read_beyond_what_is_stored():
    """Half of a loan has arrived; a read names more than that."""
    creditor = Creditor(1, 1, BlockPool(8), SchedulerParams(), headroom_blocks=0)
    loan, transfer = LoanId(0, 1, 1, 1, 1, 0), TransferId(0, 1, 1)
    creditor.on_ledger(0, DebtorLedger(1, 1, 1, ((loan, 4, False),)), 0.0)
    creditor.on_store(0, Store(transfer, loan, 0, 2))
    creditor.on_received(TransferDone(transfer, loan, ok=True))
    assert creditor.on_read(ReadStarted(0, 1, ((loan, 3),))) == [RefuseRead(0, 1, (loan,))]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_scenarios_hold(cluster, workload, family):
    for seed in range(2):
        run_case(family(seed), cluster, workload)
    read_beyond_what_is_stored()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_scenarios_hold_for_many_seeds(cluster, workload, family):
    for seed in range(60):
        run_case(family(seed), cluster, workload)


def scenarios_against(name, cluster, workload):
    """What may catch a mutant, in order."""
    family, seeds = CAUGHT_BY[name]
    return [partial(run_case, family(seed), cluster, workload) for seed in range(seeds)]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(cluster, workload, name):
    """… by a scenario that holds without it."""
    owner, function, mutate = MUTANTS[name]
    scenarios = scenarios_against(name, cluster, workload) if name in CAUGHT_BY else [read_beyond_what_is_stored]
    with patch.object(owner, function, mutate(getattr(owner, function))), pytest.raises(AssertionError) as failure:
        for scenario in scenarios:
            scenario()
    print(f"{name}: {str(failure.value).splitlines()[0]}")
    scenario()
