"""Workloads made here: lengths from a family, arrivals from `traces.arrivals`, each draw from its own stream."""

from dataclasses import asdict
from typing import Any

import numpy as np

from perfmodel.errors import InputError, unknown
from traces.arrivals import arrivals_for
from traces.catalogue import GENERATORS
from traces.collect import Clock, Rows
from traces.generators.context import draw_context, draw_output, fixed_lengths
from traces.generators.empirical import draw_pairs
from traces.options import GenerateOptions
from traces.shaping import limit_context
from traces.trace import Account, Ints, Trace


def generate_trace(name: str, options: GenerateOptions) -> Trace:
    """See `traces.generate`."""
    if name not in GENERATORS:
        raise unknown("generator", name, GENERATORS)
    account = Account(rows_read=options.num_requests)
    inputs, outputs, recorded_rps = _lengths(name, options, account)
    arrival_s, closed = arrivals_for(options, recorded_rps)
    rows = Rows(arrival_s, inputs, outputs, np.arange(1, len(inputs) + 1), Clock(None))
    rows = limit_context(rows, options, account, f"generator {name}")
    if not len(rows):
        raise InputError(f"generator {name}: no request left; {account.line()}")
    account.kept = len(rows)
    if closed is not None:
        closed = type(closed)(closed.users, closed.think_s[rows.source_row - 1])
    assert rows.time is not None
    source: dict[str, Any] = {"generator": name}
    return Trace(
        rows.time - rows.time[0],
        rows.input_tokens,
        rows.output_tokens,
        np.arange(len(rows)),
        account,
        source,
        asdict(options),
        flags=rows.more.get("flags"),
        closed=closed,
    )


def _lengths(name: str, options: GenerateOptions, account: Account) -> tuple[Ints, Ints, float | None]:
    """Input and output tokens, and the recorded rate of a generator that has one."""
    if name.startswith("empirical-"):
        return draw_pairs(name.removeprefix("empirical-"), options, account)
    if name == "fixed":
        return (*fixed_lengths(options), None)
    context_tokens = draw_context(name, options, account)
    outputs = draw_output(context_tokens, options)
    return context_tokens - outputs, outputs, None
