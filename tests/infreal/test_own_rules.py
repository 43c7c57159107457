"""`infreal` decides nothing: no policy, no protocol message and no change of a block table is written a second time."""

import ast
from pathlib import Path

import pytest

from perfmodel import messages

PACKAGE = Path(__file__).parents[2] / "infreal"
COMPLETIONS = {"RequestAborted", "MessageReceived", "IterationsDone", "TransferDone", "ReadStarted", "ReadEnded"}
COMPLETIONS |= {"PeerLost", "PeerReturned", "TimerFired", "TransferId", "LoanId", "Request"}
MESSAGES = {name for name, value in vars(messages).items() if isinstance(value, type)} - COMPLETIONS
DECISIONS = {"plan", "choose"}  # what perfmodel.policies asks of a policy
CHANGES = {
    "allocate",
    "allocate_one",
    "reserve",
    "mark_lent",
    "release",
    "pin",
    "unpin",
    "enqueue",
    "dequeue",
    "preempt",
}
READERS = {  # what may be named of the core's inside
    "perfmodel.batching": {"NO_BLOCK"},
    "perfmodel.rmanager": {"RManager"},
    "perfmodel.policies": {"DISPATCH", "BATCHING", "PLACEMENT"},
}
INSIDE = (
    "policies",
    "batching",
    "rmanager",
    "gmanager",
    "dispatcher",
    "borrower",
    "creditor",
    "debtor",
    "loan",
    "blocks",
)


def own_rules(source):
    """Lines that decide something."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            found = DECISIONS & {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            if found:
                yield f"line {node.lineno}: class {node.name} has {found}"
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in (CHANGES if isinstance(node.func, ast.Attribute) else MESSAGES):
                yield f"line {node.lineno}: {name}()"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("perfmodel"):
            part = node.module.partition(".")[2].partition(".")[0]
            foreign = {alias.name for alias in node.names} - READERS.get(node.module, set())
            if part in INSIDE and foreign:
                yield f"line {node.lineno}: {node.module} imports {foreign}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_infreal_has_no_policy_of_its_own(path):
    assert not list(own_rules(path.read_text()))


def test_the_guard_can_fail():
    assert "Send" in MESSAGES
    for source in (
        "class Mine:\n    def choose(self, view, request): ...",
        "class Mine:\n    def plan(self, view): ...",
        "manager.pool.allocate(3)",
        "queue.append(Send(0, DebtorLedger(1, 1, 1, ())))",
        "from perfmodel.policies.placement import Greedy",
        "from perfmodel.batching import Batcher",
    ):
        assert list(own_rules(source)), source
    assert not list(
        own_rules("events.append(TransferDone(transfer, loan, ok=True))\nfrom perfmodel.batching import NO_BLOCK")
    )
