"""Window, order, limits, jitter and rate: each step takes rows and returns rows, and counts what it changes."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from perfmodel.errors import InputError
from traces.arrivals import unit_arrivals
from traces.collect import Mask, Reading, Rows, with_flag
from traces.options import GenerateOptions, LoadOptions
from traces.seeds import stream
from traces.trace import Account, Floats


def cut_window(rows: Rows, reading: Reading) -> Rows:
    """Rows whose time after the file's earliest lies in [a, b)."""
    if reading.options.window_s is None:
        return rows
    if rows.time is None:
        raise InputError(f"{reading.where}: window_s needs times, the file has none")
    begin_s, end_s = reading.options.window_s
    since_s = (rows.time - rows.clock.earliest) / reading.fmt.ticks_per_s
    inside = (since_s >= begin_s) & (since_s < end_s)
    reading.account.drop("outside_window", len(rows) - int(np.count_nonzero(inside)))
    return rows.take(inside)


def limit_context(rows: Rows, options: LoadOptions | GenerateOptions, account: Account, where: str) -> Rows:
    """`max_context_tokens` applied as `over_long` says."""
    limit = options.max_context_tokens
    if limit is None:
        return rows
    context_tokens = rows.input_tokens.astype(np.int64) + rows.output_tokens
    over = context_tokens > limit
    if not over.any():
        return rows
    if options.over_long == "error":
        raise _too_long(rows, over, limit, where)
    if options.over_long == "drop":
        account.drop("over_long", int(np.count_nonzero(over)))
        return rows.take(~over)
    return _clip_input(rows, over, limit, account)


def _too_long(rows: Rows, over: Mask, limit: int, where: str) -> InputError:
    row = int(np.argmax(over))
    return InputError(
        f"{where}, row {rows.source_row[row]}: {rows.input_tokens[row]} + {rows.output_tokens[row]} tokens are more than "
        f"max_context_tokens {limit} ({np.count_nonzero(over)} such rows; over_long: drop or clip_input admits them)"
    )


def _clip_input(rows: Rows, over: Mask, limit: int, account: Account) -> Rows:
    hopeless = rows.output_tokens >= limit
    account.drop("output_over_limit", int(np.count_nonzero(hopeless)))
    clipped = over & ~hopeless
    account.change("input_clipped", int(np.count_nonzero(clipped)))
    inputs = np.where(clipped, limit - rows.output_tokens, rows.input_tokens)
    more = {**rows.more, "flags": with_flag(rows.more.get("flags"), clipped, "clipped")}
    return Rows(rows.time, inputs, rows.output_tokens, rows.source_row, rows.clock, more).take(~hopeless)


def arrivals_of(rows: Rows, reading: Reading) -> tuple[Rows, Floats]:
    """Rows in order of arrival, at most `num_requests` of them, and their arrivals in seconds, the first at 0."""
    if rows.time is None:
        rows = _first(rows, reading)
        return rows, _without_times(len(rows), reading)
    arrival_s: Floats = (rows.time - rows.time.min()) / reading.fmt.ticks_per_s
    arrival_s = _jittered(arrival_s, rows, reading)
    if np.any(arrival_s[1:] < arrival_s[:-1]):
        order = np.argsort(arrival_s, kind="stable")
        rows, arrival_s = rows.take(order), arrival_s[order]
    rows = _first(rows, reading)
    arrival_s = arrival_s[: len(rows)]
    if arrival_s[0] != 0.0:
        arrival_s = arrival_s - arrival_s[0]
    return replace(rows, time=None), _at_rate(arrival_s, reading.options.rate_rps, reading.where)


def _first(rows: Rows, reading: Reading) -> Rows:
    num_requests = reading.options.num_requests
    if num_requests is None or num_requests >= len(rows):
        return rows
    reading.account.drop("beyond_num_requests", len(rows) - num_requests)
    return rows.take(np.arange(num_requests))


def _without_times(num_requests: int, reading: Reading) -> Floats:
    options, notes = reading.options, reading.account.notes
    if options.jitter:
        raise InputError(f"{reading.where}: jitter spreads times, the file has none")
    if options.rate_rps is None:
        notes.append("the file has no times: all requests arrive at 0")
        return np.zeros(num_requests)
    notes.append(f"the file has no times: Poisson arrivals at {options.rate_rps:g}/s, seed {options.seed}")
    return unit_arrivals(num_requests, 1.0, options.seed) / options.rate_rps


def _jittered(arrival_s: Floats, rows: Rows, reading: Reading) -> Floats:
    """Arrivals moved to a uniform place within their step of a coarse clock; the account says which it is."""
    tick_s, options, notes = reading.fmt.tick_s, reading.options, reading.account.notes
    if tick_s is None or not rows.clock.is_coarse:
        if options.jitter:
            raise InputError(f"{reading.where}: jitter is for a coarse clock, and this file's is not one")
        return arrival_s
    if not options.jitter:
        notes.append(f"arrivals lie on a {tick_s:g} s grid: as is")
        return arrival_s
    notes.append(f"arrivals lie on a {tick_s:g} s grid: jittered within it, seed {options.seed}")
    jittered: Floats = arrival_s + stream(options.seed, "jitter").uniform(0.0, tick_s, len(arrival_s))
    return jittered


def _at_rate(arrival_s: Floats, rate_rps: float | None, where: str) -> Floats:
    """Gaps rescaled to a mean rate: the arrivals at rate 1, divided by the rate, so that t(r) = t(1)/r to the last bit."""
    if rate_rps is None or len(arrival_s) == 1:
        return arrival_s
    if arrival_s[-1] == 0.0:
        raise InputError(f"{where}: rate_rps rescales gaps, but all arrivals are at one instant")
    unit_s: Floats = arrival_s * ((len(arrival_s) - 1) / arrival_s[-1])
    return unit_s / rate_rps


def with_int_ids(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`ids` as int64 where every one is a whole number in its plain spelling, else as str."""
    texts = [str(item) for item in ids]
    try:
        numbers = [int(text) for text in texts]
        if all(str(number) == text for number, text in zip(numbers, texts, strict=True)):
            return np.array(numbers, dtype=np.int64)
    except (ValueError, OverflowError):
        pass
    return np.array(texts, dtype=str)
