"""The fidelity report as a table, with what was aimed at."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.fidelity import CROSS, FIT, PRICED, Slice

if TYPE_CHECKING:
    from rich.table import Table

TARGETS = {"gemm": 0.08, "decode_attention": 0.05, "prefill_attention": 0.05, "all_reduce": 0.05}  # of held-out slices
CROSS_TARGET = 0.10


def target_of(piece: Slice) -> float | None:
    """What was aimed at: held-out slices by operator, other sources within 10 % where they are expected to agree."""
    if piece.kind == CROSS:
        agrees = "8–128 tokens" in piece.rows_are or "8 rows and more" in piece.rows_are
        return CROSS_TARGET if agrees else None
    return TARGETS.get(piece.operator) if piece.kind != PRICED else None


def render(slices: Sequence[Slice]) -> "Table":
    """One line a slice."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("operator", "rows", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("number", "MAPE", "median", "p90", "bias", "target"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for piece in slices:
        if before and piece.operator != before:
            table.add_section()
        target = target_of(piece)
        aim = f"≤ {target:.0%} {'met' if piece.mape <= target else 'missed'}" if target else ""
        figures = f"{piece.mape:.1%}", f"{piece.median:.1%}", f"{piece.p90:.1%}", f"{piece.bias:+.1%}"
        source = f"{piece.kind}: {piece.source.partition(' ')[2]}" if piece.kind in (CROSS, FIT, PRICED) else piece.kind
        table.add_row(piece.operator, piece.rows_are, source, f"{piece.rows:,}", *figures, aim)
        before = piece.operator
    return table
