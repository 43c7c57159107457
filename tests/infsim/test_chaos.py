"""The pool under faults: whatever is delayed, lost, doubled, killed or accused, nothing leaks, no row reads wrong data, and every
request has one end. The coverage table says how often each step of a loan has met each class of fault."""

import json
import os
from collections import Counter

import pytest
from chaoscase import FAULTS, chaos_case
from chaosrun import HAPPENINGS, run_case

from perfmodel.loan import TRANSITIONS, Cause, State

BLOCKS = 10  # tests that share the seeds of a suite
SEEDS, SLOW_SEEDS = 100, 1000

EXEMPT = {  # (state, cause, class of fault or "any"): why
    (
        State.CLOSING,
        Cause.LISTED,
        "any",
    ): "nothing reads an asked loan: when it ends, its fence falls within the same event",
    (State.GRANTED, Cause.LOST, "none"): "without a fault nothing that is granted is lost",
    (State.HELD, Cause.LOST, "none"): "without a fault only a reclaim that is not met within a lease ends a loan",
    (State.CLOSING, Cause.LOST, "none"): "without a fault only a reclaim that is not met within a lease ends a loan",
}


def run_seeds(seeds, cluster, workload):
    """How often each transition has met each class of fault, as {"state cause fault": count}, and what else has happened."""
    counts = Counter()
    for seed in seeds:
        run_case(chaos_case(seed), cluster, workload, counts)
    return counts


def table(counts):
    """The coverage table as text: one line a transition, one column a class of fault; and what else has happened."""
    lines = [f"{'state':<9}{'cause':<9}" + "".join(f"{fault:>10}" for fault in FAULTS)]
    for state, cause in TRANSITIONS:
        numbers = "".join(f"{counts[f'{state} {cause} {fault}']:>10}" for fault in FAULTS)
        lines.append(f"{state:<9}{cause:<9}{numbers}")
    lines += [f"{name}: {counts[name]}" for name in HAPPENINGS]
    lines += [f"exempt: {state} {cause} ({fault}): {why}" for (state, cause, fault), why in EXEMPT.items()]
    return "\n".join(lines)


def sum_of_blocks(name, block, counts, tmp_path_factory):
    """The counts of all blocks of seeds, for the block that ends last; None for the others. Blocks may run in any process."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    mine = folder / f"{name}-{block}.json"
    mine.with_suffix(".part").write_text(json.dumps(counts))
    mine.with_suffix(".part").replace(mine)
    files = [folder / f"{name}-{i}.json" for i in range(BLOCKS)]
    if not all(file.exists() for file in files):
        return None
    return sum((Counter(json.loads(file.read_text())) for file in files), Counter())


def is_wanted(state, cause, fault):
    return not any((state, cause, which) in EXEMPT for which in (fault, "any"))


def lacking(counts, at_least, faults):
    """Reachable pairs of a transition and a class of fault, and other happenings, that were hit too rarely."""
    pairs = [(state, cause, fault) for state, cause in TRANSITIONS for fault in faults]
    names = [f"{state} {cause} {fault}" for state, cause, fault in pairs if is_wanted(state, cause, fault)]
    return {name: counts[name] for name in (*names, *HAPPENINGS) if counts[name] < at_least}


@pytest.mark.parametrize("block", range(BLOCKS))
def test_chaos(cluster, workload, tmp_path_factory, block):
    """100 seeds; together they take every reachable transition."""
    size = SEEDS // BLOCKS
    counts = run_seeds(range(block * size, block * size + size), cluster, workload)
    total = sum_of_blocks("chaos", block, counts, tmp_path_factory)
    if total is not None:
        print(table(total))
        whatever = Counter(total)
        for name, count in total.items():
            whatever[name.rpartition(" ")[0] + " whatever"] += count
        assert not lacking(whatever, 1, ["whatever"])


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_chaos_of_a_thousand_seeds(cluster, workload, tmp_path_factory, block):
    """1,000 seeds; every transition has met every class of fault."""
    size = SLOW_SEEDS // BLOCKS
    counts = run_seeds(range(block * size, block * size + size), cluster, workload)
    total = sum_of_blocks("chaos-slow", block, counts, tmp_path_factory)
    if total is not None:
        print(table(total))
        assert not lacking(total, 5, FAULTS)
