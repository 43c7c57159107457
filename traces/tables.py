"""Makes the tables of `traces/data` from real traces: marginal quantiles and the joint distribution of ranks.

    python -m traces.tables DATA_FOLDER [OUT_FOLDER]

DATA_FOLDER holds the public traces (azure/, mooncake/, servegen/); the tables hold statistics only, no row of a trace.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traces.loading import load_trace
from traces.options import LoadOptions
from traces.seeds import stream
from traces.trace import Floats, Ints, Trace

BINS = 20
PARTS = (np.linspace(0, 1, 201), np.linspace(0.98, 1, 81), [0.9999, 0.99999])  # closer together where the tail is long
PROBABILITIES = np.unique(np.round(np.concatenate(PARTS), 6))


@dataclass(frozen=True)
class Source:
    """A public trace and what must be said of it."""

    format: str
    path: str
    text: str


SOURCES = {
    "azure-conv": Source(
        "azure-2023", "azure/AzureLLMInferenceTrace_conv.csv", "Azure LLM inference 2023, conversation (CC-BY-4.0)"
    ),
    "azure-code": Source(
        "azure-2023", "azure/AzureLLMInferenceTrace_code.csv", "Azure LLM inference 2023, code (CC-BY-4.0)"
    ),
    "mooncake-conversation": Source(
        "mooncake", "mooncake/conversation_trace.jsonl", "Mooncake, conversation (Apache-2.0)"
    ),
    "mooncake-synthetic": Source("mooncake", "mooncake/synthetic_trace.jsonl", "Mooncake, synthetic (Apache-2.0)"),
    "servegen-deepseek-r1": Source(
        "servegen", "servegen/reason/deepseek-r1", "ServeGen, 12 clients of deepseek-r1, one day (Apache-2.0)"
    ),
}


def joint_table(trace: Trace, source: Source) -> dict[str, Any]:
    """The table of a trace, fit for JSON."""
    return {
        "source": source.text,
        "sha256": trace.source["sha256"],
        "num_requests": len(trace),
        "rate_rps": round(trace.mean_rate_rps, 6),
        "spearman": round(rank_correlation(trace.input_tokens, trace.output_tokens), 4),
        "probabilities": PROBABILITIES.tolist(),
        "input_tokens": quantiles(trace.input_tokens),
        "output_tokens": quantiles(trace.output_tokens),
        "joint_count": joint_counts(trace.input_tokens, trace.output_tokens).tolist(),
    }


def quantiles(tokens: Ints) -> list[int]:
    """Values of the empirical distribution at `PROBABILITIES`."""
    return [int(value) for value in np.quantile(tokens, PROBABILITIES, method="inverted_cdf")]


def joint_counts(inputs: Ints, outputs: Ints) -> Ints:
    """Requests per (input rank, output rank) bin `[BINS, BINS]`; every row and column holds 1/BINS of them (± 1)."""
    bins = [(broken_ranks(tokens, side) * BINS) // len(tokens) for side, tokens in enumerate((inputs, outputs))]
    counts = np.zeros((BINS, BINS), dtype=np.int64)
    np.add.at(counts, (bins[0], bins[1]), 1)
    return counts


def broken_ranks(tokens: Ints, side: int) -> Ints:
    """Ranks 0 … n − 1, ties in random order (seeded), so that equal lengths spread over their ranks evenly."""
    order = np.lexsort((stream(side, "mixture").random(len(tokens)), tokens))
    ranks = np.empty(len(tokens), dtype=np.int64)
    ranks[order] = np.arange(len(tokens))
    return ranks


def rank_correlation(first: Ints, second: Ints) -> float:
    """Spearman's, ties at their mean rank."""
    return float(np.corrcoef(mean_ranks(first), mean_ranks(second))[0, 1])


def mean_ranks(tokens: Ints) -> Floats:
    _, inverse, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[inverse]
    return ranks


def main(arguments: list[str]) -> None:
    if len(arguments) not in (1, 2):
        sys.exit("usage: python -m traces.tables DATA_FOLDER [OUT_FOLDER]")
    data = Path(arguments[0])
    out = Path(arguments[1]) if len(arguments) > 1 else Path(__file__).parent / "data"
    for name, source in SOURCES.items():
        trace = load_trace(source.format, data / source.path, LoadOptions())
        (out / f"{name}.json").write_text(json.dumps(joint_table(trace, source), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
