"""Laws of one machine and one model, from what `infreal profile` measured: layers, the head, attention, the host, the link."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from experiments.profile import Profile
from perfmodel.calibrate import FitError
from perfmodel.calibrate_whole import fit_knots, fit_whole_decode, fit_whole_prefill, relative_nnls
from perfmodel.errors import InputError

Fit = Callable[[pd.DataFrame], tuple[Any, FitError]]


def column(table: pd.DataFrame, name: str) -> "np.ndarray[Any, Any]":
    return table[name].to_numpy(float)


FITS: dict[str, Fit] = {
    "layer": lambda table: fit_knots(column(table, "tokens"), column(table, "time_s")),
    "head": lambda table: fit_knots(column(table, "rows"), column(table, "time_s")),
    "decode_attention": lambda table: fit_whole_decode(
        column(table, "rows"), column(table, "context_tokens"), column(table, "time_s")
    ),
    "prefill_attention": lambda table: fit_whole_prefill(
        column(table, "tokens"), column(table, "context_tokens") - column(table, "tokens"), column(table, "time_s")
    ),
}


def fit_machine(profile: Profile) -> dict[str, tuple[Any, FitError]]:
    """All four. Raises InputError where one is missing: the parts of an iteration belong together."""
    missing = [name for name in FITS if profile.operator(name).empty]
    if missing:
        raise InputError(f"{profile.path}: no rows of {', '.join(missing)} (infreal profile was not finished)")
    return {name: fit(profile.operator(name)) for name, fit in FITS.items()}


def engine_entry(profile: Profile) -> dict[str, float]:
    """The host side as `EngineSpec` has it: launches are part of what was measured; the wire of an exchange is the link's."""
    host = profile.operator("host")
    if host.empty:
        raise InputError(f"{profile.path}: no rows of host (infreal profile was not finished)")
    rows = column(host, "rows")
    exchange, messages = profile.operator("exchange_overhead"), profile.operator("message")
    on_actors, on_core = (
        profile.operator(name)["time_s"].sum() for name in ("actor_iterations", "actor_iterations_core")
    )
    iteration_s, row_s = relative_nnls([np.ones(len(rows)), rows], column(host, "time_s"))
    return {
        "launch_s_per_layer": 0.0,
        "iteration_s": iteration_s,
        "row_s": row_s,
        "exchange_s_per_layer_per_peer": float(exchange["time_s"].median()) if len(exchange) else 0.0,
        "fitted_rows": int(rows.max()),
        "background_frac": float(1 - on_core / on_actors) if on_actors else 0.0,
        "message_s": float(messages["time_s"].mean()) if len(messages) else 0.0,
    }


def link_entry(profile: Profile) -> dict[str, float]:
    """The link as a configuration takes it: half a round trip of a small message, and the rate of large ones beside a model.

    Empty where no second process was measured.
    """
    pings, moves = profile.operator("exchange"), profile.operator("send_recv_beside")
    if pings.empty or moves.empty:
        return {}
    latency_s = float(column(pings.sort_values("num_bytes"), "time_s")[0]) / 2
    largest = moves.sort_values("num_bytes")
    num_bytes, move_s = (float(column(largest, name)[-1]) for name in ("num_bytes", "time_s"))
    return {"bytes_per_s": num_bytes / (move_s - 2 * latency_s), "latency_s": latency_s}
