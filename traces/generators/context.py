"""Families of context lengths (input + output) and how a context splits. Our reconstruction of the paper's nine traces is here.

Only the ranges of the nine are the paper's; families, parameters and splits are our choice (workloads.md), and the account of a
generated workload says so.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from perfmodel.errors import InputError, unknown
from traces.chunk import MAX_TOKENS
from traces.lengths import LogUniform, TruncatedLogNormal, checked_lognormal, fit_lognormal
from traces.options import GenerateOptions, check_int, check_number
from traces.seeds import stream
from traces.trace import Account, Floats, Ints

MIN_CONTEXT_TOKENS = 2  # one token in, one out
OUTPUT_CAP_TOKENS = 2048
PAPER_NOTE = "a reconstruction: only the range of the context is the paper's"

# workloads.md: mean/SD 8,000/12,000, 8,000/8,000 and 8,000/4,000 on 1–60K.
PAPER_UNIMODAL = {
    "paper-0": TruncatedLogNormal(8.1789, 2.2525, 1, 60_000),
    "paper-1": TruncatedLogNormal(8.6002, 0.9301, 1, 60_000),
    "paper-2": TruncatedLogNormal(8.8756, 0.4725, 1, 60_000),
}
# workloads.md: 90 % short requests (mean 2,000, SD 3,000), 10 % log-uniform from 32K to the longest.
PAPER_SHORT = TruncatedLogNormal(6.9021, 1.2268, 1, 32_000)
PAPER_TAIL_FRAC = 0.1
PAPER_LONGEST = {f"paper-{3 + i}": thousands * 1000 for i, thousands in enumerate((200, 400, 600, 1000, 1500, 2000))}
# workloads.md: mean 256, SD 256.
PROMPT_HEAVY = TruncatedLogNormal(5.1626, 0.9134, 1, OUTPUT_CAP_TOKENS)


def draw_context(name: str, options: GenerateOptions, account: Account) -> Ints:
    """Context lengths `[num_requests]`, each ≥ 2."""
    if name in PAPER_UNIMODAL or name in PAPER_LONGEST:
        account.notes.append(PAPER_NOTE)
        take_params(options.params)
    if name in PAPER_UNIMODAL:
        return _whole(PAPER_UNIMODAL[name].quantile(_uniforms(options, "context")))
    if name in PAPER_LONGEST:
        tail = LogUniform(PAPER_SHORT.max_tokens, PAPER_LONGEST[name])
        return _pinned(_mixed(PAPER_SHORT, tail, PAPER_TAIL_FRAC, options), PAPER_LONGEST[name], options)
    return _PARAMETRIC[name](options)


def _lognormal(options: GenerateOptions) -> Ints:
    params = take_params(options.params, needed=("max_tokens",), optional=LOGNORMAL_PARAMS)
    return _whole(_lognormal_of(params).quantile(_uniforms(options, "context")))


def _loguniform_mix(options: GenerateOptions) -> Ints:
    optional = (*LOGNORMAL_PARAMS, "tail_frac")
    params = take_params(options.params, needed=("max_tokens", "tail_max_tokens"), optional=optional)
    short, longest, frac = _lognormal_of(params), params["tail_max_tokens"], params.get("tail_frac", PAPER_TAIL_FRAC)
    if not short.max_tokens < longest <= MAX_TOKENS:
        raise InputError(f"params.tail_max_tokens: {longest:g} is not above max_tokens {short.max_tokens:g}")
    if frac > 1.0:
        raise InputError(f"params.tail_frac: {frac:g} is not in [0, 1]")
    return _mixed(short, LogUniform(short.max_tokens, longest), frac, options)


_PARAMETRIC: dict[str, Callable[[GenerateOptions], Ints]] = {"lognormal": _lognormal, "loguniform-mix": _loguniform_mix}
LOGNORMAL_PARAMS = ("mean_tokens", "sd_tokens", "mu", "sigma", "min_tokens")


def take_params(given: Mapping[str, Any], needed: Sequence[str] = (), optional: Sequence[str] = ()) -> dict[str, float]:
    """The parameters as finite floats (≥ 0 but for mu); raises for one that is missing or not known."""
    for key in given:
        if key not in (*needed, *optional):
            raise unknown("parameter", f"params.{key}", [f"params.{name}" for name in (*needed, *optional)] or ["none"])
    for key in needed:
        if key not in given:
            raise InputError(f"params.{key}: is needed")
    return {key: check_number(f"params.{key}", value, -1e9 if key == "mu" else 0.0) for key, value in given.items()}


def _lognormal_of(params: dict[str, float]) -> TruncatedLogNormal:
    """From mean and SD after truncation, or from mu and sigma before it."""
    low, high = params.get("min_tokens", 1.0), params["max_tokens"]
    if not 1.0 <= low < high <= MAX_TOKENS:
        raise InputError(f"params.min_tokens, max_tokens: [{low:g}, {high:g}] is not inside [1, {MAX_TOKENS}]")
    by_moments, by_shape = params.keys() >= {"mean_tokens", "sd_tokens"}, params.keys() >= {"mu", "sigma"}
    if by_moments == by_shape:
        raise InputError("params: give either mean_tokens and sd_tokens, or mu and sigma")
    for key in ("sd_tokens", "sigma"):
        if params.get(key) == 0.0:
            raise InputError(f"params.{key}: 0 is not > 0; the generator fixed has equal requests")
    if not by_moments:
        return checked_lognormal(params["mu"], params["sigma"], low, high)
    if not low < params["mean_tokens"] < high:
        raise InputError(f"params.mean_tokens: {params['mean_tokens']:g} is not inside ({low:g}, {high:g})")
    return fit_lognormal(params["mean_tokens"], params["sd_tokens"], low, high)


def _mixed(short: TruncatedLogNormal, tail: LogUniform, tail_frac: float, options: GenerateOptions) -> Ints:
    """Each request from the tail with probability `tail_frac`; which, and how long, are separate streams."""
    uniforms = _uniforms(options, "context")
    is_tail = _uniforms(options, "mixture") < tail_frac
    lengths = short.quantile(uniforms)
    lengths[is_tail] = tail.quantile(uniforms[is_tail])
    return _whole(lengths)


def _pinned(context_tokens: Ints, longest: int, options: GenerateOptions) -> Ints:
    """Exactly one request is the longest one. Its place is drawn, and alone depends on how many requests there are."""
    pinned = np.minimum(context_tokens, longest - 1)
    pinned[int(stream(options.seed, "pin").integers(len(pinned)))] = longest
    return pinned


def draw_output(context_tokens: Ints, options: GenerateOptions) -> Ints:
    """Output tokens of each context: ≥ 1, and at least one token of input remains."""
    half = context_tokens // 2
    split = options.output or "balanced"
    if split == "share-50":
        return np.maximum(half, 1)
    if split == "chat":
        return np.clip(half, 1, OUTPUT_CAP_TOKENS)
    if split == "balanced":
        return np.clip(context_tokens // 5, 1, OUTPUT_CAP_TOKENS)
    drawn = _whole(PROMPT_HEAVY.quantile(_uniforms(options, "output")), low=1)
    return np.clip(drawn, 1, np.maximum(half, 1))


def fixed_lengths(options: GenerateOptions) -> tuple[Ints, Ints]:
    """`params.input_tokens` and `params.output_tokens` for every request."""
    if options.output is not None:
        raise InputError(f"output: generator fixed has an output_tokens of its own ({options.output})")
    params = take_params(options.params, needed=("input_tokens", "output_tokens"))
    for key in params:
        check_int(f"params.{key}", options.params[key], 1)
    inputs, outputs = (np.full(options.num_requests, int(params[f"{side}_tokens"])) for side in ("input", "output"))
    return inputs, outputs


def _uniforms(options: GenerateOptions, name: str) -> Floats:
    return stream(options.seed, name).random(options.num_requests)


def _whole(lengths: Floats, low: int = MIN_CONTEXT_TOKENS) -> Ints:
    return np.maximum(np.rint(lengths).astype(np.int64), low)
