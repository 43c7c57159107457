"""Pairs (input, output) drawn as in a real trace: its marginal quantiles and the joint distribution of its ranks.

The tables in `traces/data` are statistics of public traces (source and licence are in each file), made by `traces.tables`.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from perfmodel.errors import InputError
from traces.generators.context import take_params
from traces.options import GenerateOptions
from traces.seeds import stream
from traces.trace import Account, Floats, Ints


@dataclass(frozen=True)
class JointTable:
    """Marginal quantiles at `probabilities` and the shares `[bins, bins]` of requests per (input rank, output rank) bin."""

    probabilities: Floats
    input_tokens: Floats
    output_tokens: Floats
    joint_frac: Floats
    rate_rps: float
    source: str

    def draw(self, cell: Floats, input_rank: Floats, output_rank: Floats) -> tuple[Ints, Ints]:
        """Lengths from three uniform numbers per request: which bin, and the place within it for either rank."""
        bins = len(self.joint_frac)
        edges = np.cumsum(self.joint_frac.ravel())
        index = np.minimum(np.searchsorted(edges, cell * edges[-1], side="right"), bins * bins - 1)
        rows, columns = np.divmod(index, bins)
        inputs = self._quantile(self.input_tokens, (rows + input_rank) / bins)
        return inputs, self._quantile(self.output_tokens, (columns + output_rank) / bins)

    def _quantile(self, values: Floats, probability: Floats) -> Ints:
        return np.rint(np.interp(probability, self.probabilities, values)).astype(np.int64)


@cache
def table(name: str) -> JointTable:
    """The table of `traces/data/{name}.json`."""
    raw: dict[str, Any] = json.loads((files("traces") / "data" / f"{name}.json").read_text("utf-8"))
    names = ("probabilities", "input_tokens", "output_tokens", "joint_count")
    probabilities, inputs, outputs, counts = (np.array(raw[key], dtype=np.float64) for key in names)
    return JointTable(probabilities, inputs, outputs, counts / counts.sum(), raw["rate_rps"], raw["source"])


def draw_pairs(name: str, options: GenerateOptions, account: Account) -> tuple[Ints, Ints, float]:
    """Input tokens, output tokens, and the mean rate of the recorded trace."""
    if options.output is not None:
        raise InputError(f"output: generator empirical-{name} draws its own output lengths ({options.output})")
    take_params(options.params)
    joint = table(name)
    account.notes.append(f"drawn from a table of statistics of {joint.source}")
    uniforms = (stream(options.seed, part).random(options.num_requests) for part in ("mixture", "context", "output"))
    return (*joint.draw(*uniforms), joint.rate_rps)
