"""What a user may ask of a loader or a generator, checked when built. Keys are those of a configuration's `workload:`."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perfmodel.errors import InputError, unknown

OVER_LONG = ("error", "drop", "clip_input")
OUTPUTS = ("chat", "balanced", "prompt-heavy", "share-50")
ARRIVALS = ("poisson", "gamma", "piecewise", "ramp", "diurnal", "closed", "saturated")


@dataclass(frozen=True)
class LoadOptions:
    """How a recorded trace is offered.

    - `window_s`: keep arrivals in [a, b) seconds after the file's earliest time, then re-base. None: all.
    - `num_requests`: keep the first n requests in order of arrival. None: all.
    - `rate_rps`: rescale the gaps (and only them) to this mean rate. None: as recorded. A file without times gets Poisson
      arrivals at this rate, or all of them at 0.
    - `jitter`: spread arrivals within the step of a coarse clock (Mooncake conversation 3 s, BurstGPT 1 s), seeded.
    - `max_context_tokens`: limit on input + output; `over_long` says what happens beyond it: `error`, `drop` or `clip_input`
      (the input is shortened; a request whose output alone fills the limit is dropped). None: no limit.
    - `keep_failed`: keep rows with zero input or output, as one token and with the flag `failed`.
    - `seed`: for the jitter and for formats that are drawn from (servegen). `tokenizer`: a tokenizer.json, for sharegpt.
    """

    window_s: tuple[float, float] | None = None
    num_requests: int | None = None
    rate_rps: float | None = None
    jitter: bool = False
    max_context_tokens: int | None = None
    over_long: str = "error"
    keep_failed: bool = False
    seed: int = 0
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.window_s is not None:
            object.__setattr__(self, "window_s", check_window(self.window_s))
        check_common(self)


@dataclass(frozen=True)
class GenerateOptions:
    """How a workload is generated.

    - `output`: how a context splits into input and output (workloads.md): `chat`, `balanced`, `prompt-heavy`, `share-50`.
      None: `balanced`. Generators that draw their own output lengths (empirical, fixed) accept None only.
    - `arrivals`: `poisson` · `gamma` (with `cv`) · `piecewise` (`profile`: steps (start_s, share of rate_rps)) · `ramp` (from
      `depth` less than rate_rps up to it over `period_s`) · `diurnal` (sine of `period_s`, ±`depth`) · `closed` (`users`, each
      sends, waits for the answer, thinks) · `saturated` (all at 0).
      The profile is in seconds and does not stretch with the rate. `cv` is that of the gaps, 1 = Poisson.
    - `rate_rps`: mean rate (None: the recorded rate of an empirical generator; an error elsewhere, where one is needed).
    - `think_s`: mean of the think time, drawn with `think_cv` (0: constant, 1: exponential).
    - `params`: the parametric generators' own parameters.
    """

    num_requests: int = 1000
    output: str | None = None
    arrivals: str = "poisson"
    rate_rps: float | None = None
    cv: float = 1.0
    users: int | None = None
    think_s: float = 0.0
    think_cv: float = 1.0
    profile: tuple[tuple[float, float], ...] | None = None
    period_s: float = 86_400.0
    depth: float = 0.8
    max_context_tokens: int | None = None
    over_long: str = "error"
    seed: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_common(self)
        if self.output is not None and self.output not in OUTPUTS:
            raise unknown("output split", self.output, OUTPUTS)
        if self.arrivals not in ARRIVALS:
            raise unknown("arrivals", self.arrivals, ARRIVALS)
        check_arrivals(self)
        if self.profile is not None:
            object.__setattr__(self, "profile", check_profile(self.profile))


def check_common(options: LoadOptions | GenerateOptions) -> None:
    """Bounds of the keys that loaders and generators share."""
    check_int("num_requests", options.num_requests, 1)
    check_int("max_context_tokens", options.max_context_tokens, 2)
    check_int("seed", options.seed, 0)
    if options.rate_rps is not None:
        check_number("rate_rps", options.rate_rps, 0.0, strict=True)
    if options.over_long not in OVER_LONG:
        raise unknown("over_long", options.over_long, OVER_LONG)


def check_arrivals(options: GenerateOptions) -> None:
    """What each kind of arrivals needs; a key that it would not use is refused rather than ignored."""
    check_number("cv", options.cv, 0.0, strict=True)
    check_number("think_s", options.think_s, 0.0)
    check_number("think_cv", options.think_cv, 0.0)
    check_number("period_s", options.period_s, 0.0, strict=True)
    check_int("users", options.users, 1)
    if not 0.0 <= options.depth < 1.0:
        raise InputError(f"depth: {options.depth} is not in [0, 1)")
    if (options.users is None) == (options.arrivals == "closed"):
        raise InputError(f"users: arrivals closed need it, others do not take it (arrivals {options.arrivals})")
    if (options.profile is None) == (options.arrivals == "piecewise"):
        raise InputError(f"profile: arrivals piecewise need it, others do not take it (arrivals {options.arrivals})")
    if options.arrivals in ("poisson", "closed", "saturated") and options.cv != 1.0:
        raise InputError(f"cv: arrivals {options.arrivals} do not take it ({options.cv}); use arrivals gamma")
    if options.arrivals in ("closed", "saturated") and options.rate_rps is not None:
        raise InputError(f"rate_rps: arrivals {options.arrivals} do not take it ({options.rate_rps})")
    if options.arrivals != "closed" and options.think_s != 0.0:
        raise InputError(f"think_s: only arrivals closed take it (arrivals {options.arrivals})")


def check_window(window_s: Iterable[float]) -> tuple[float, float]:
    """The window as two floats, 0 ≤ a < b."""
    ends = tuple(window_s)
    if len(ends) != 2:
        raise InputError(f"window_s: needs two numbers [a, b), not {len(ends)}")
    begin_s, end_s = (check_number("window_s", end, 0.0, allow_inf=True) for end in ends)
    if not begin_s < end_s:
        raise InputError(f"window_s: [{begin_s:g}, {end_s:g}) is empty; the first number must be below the second")
    return begin_s, end_s


def check_profile(profile: Iterable[Iterable[float]]) -> tuple[tuple[float, float], ...]:
    """Steps (start_s, share of the rate): from 0, ascending, and the last one above zero, since it lasts for ever."""
    steps = []
    for step in profile:
        pair = tuple(step)
        if len(pair) != 2:
            raise InputError(f"profile: a step is (start_s, share of rate_rps), not {pair!r}")
        steps.append((check_number("profile", pair[0], 0.0), check_number("profile", pair[1], 0.0)))
    starts = [start_s for start_s, _ in steps]
    if not starts or starts[0] != 0.0 or sorted(set(starts)) != starts:
        raise InputError(f"profile: starts must ascend from 0, not {starts}")
    if steps[-1][1] == 0.0:
        raise InputError("profile: the last share is 0, so the remaining requests would never arrive")
    return tuple(steps)


def check_int(key: str, value: int | None, low: int) -> None:
    """`value` is None or an integer ≥ `low`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{key}: {value!r} is not an integer ≥ {low}")


def check_number(key: str, value: float, low: float, *, strict: bool = False, allow_inf: bool = False) -> float:
    """`value` as a float, finite and ≥ `low` (> `low` where strict)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise InputError(f"{key}: {value!r} is not a number")
    if value < low or (strict and value == low) or (math.isinf(value) and not allow_inf):
        raise InputError(
            f"{key}: {value!r} is not {'>' if strict else '≥'} {low:g}{'' if allow_inf else ' and finite'}"
        )
    return float(value)
