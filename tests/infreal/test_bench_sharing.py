"""The benchmark of DistAttention's cost: what it measures is right, and its table is printed."""

import pytest
import torch
from pool_tools import tiny_decoder

from infreal.bench.__main__ import main
from infreal.bench.sharing import CASES, Debtor, measure_sharing, report

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", list(CASES))
def test_every_case_reads_the_whole_context(name):
    """With equal keys and values everywhere, attention is the value, wherever it lies, and the logits are the same."""
    debtors = [Debtor(tiny_decoder(), 2, 128, shares, "torch") for shares in (CASES["all at home"], CASES[name])]
    for debtor in debtors:
        for pool in (debtor.pool, *(serving.kv_pool for serving in debtor.servings)):
            pool.fill_(0.5)
    logits = [debtor.iterate() for debtor in debtors]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    tokens = [int(d.batch.num_kv_tokens[0]) + sum(int(s._kv_tokens[0]) for s in d.servings) for d in debtors]
    assert tokens == [129, 129]


def test_the_table_has_a_line_a_case():
    found = measure_sharing(tiny_decoder(), rows=1, context_tokens=64, backend="torch")
    lines = report(found, 3).splitlines()
    assert len(lines) == 1 + len(CASES)
    assert all(timing.median_s > 0 for timing, _ in found.values())
    assert [num_bytes > 0 for _, num_bytes in found.values()] == [False, True, True, True]


def test_wrong_sizes_are_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["sharing", "--context", "10"])
    assert exit_.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
