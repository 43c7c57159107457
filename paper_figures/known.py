"""What the paper's figures say: the values that ours are put beside. Literal, and never an input of a simulation.

Sources: [A] the paper's abstract, or several accounts of it that agree · [1] one account only · [fig] read off a picture of
the paper's figure. The full text was not available. Where a range is given, `high` is its upper end.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """One value of one figure. `name` is what a figure's script calls its own value."""

    figure: str
    name: str
    value: float
    unit: str
    source: str
    high: float | None = None

    def deviation(self, ours: float) -> float:
        """Ours / the paper's − 1; 0 within a range, from its nearer end outside."""
        if self.high is None:
            return ours / self.value - 1
        return 0.0 if self.value <= ours <= self.high else ours / (self.value if ours < self.value else self.high) - 1


KNOWN = (
    Known("1a", "throughput of DP32TP1", 34_432, "tok/s", "fig"),
    Known("1a", "throughput of DP4TP8", 6_092, "tok/s", "fig"),
    Known("1a", "throughput of DP1TP32", 821, "tok/s", "fig"),
    Known("1a", "longest context of DP32TP1", 88_000, "tokens", "fig"),
    Known("1a", "longest context of DP4TP8", 850_000, "tokens", "fig"),
    Known("1a", "longest context of DP1TP32", 2_000_000, "tokens", "fig"),
    Known("1a", "throughput of Infinite-LLM over DP32TP1", 1.0, "×", "fig"),
    Known("1a", "context of Infinite-LLM over DP1TP32", 1.0, "×", "fig"),
    Known("1b", "attention memory at 1,000K", 500, "GB", "fig"),
    Known("1b", "attention memory at 2,000K", 1_000, "GB", "fig"),
    Known("1c", "utilisation at TP1", 0.28, "", "fig"),
    Known("1c", "utilisation at TP4", 0.145, "", "fig"),
    Known("1c", "utilisation at TP8", 0.075, "", "fig"),
    Known("1c", "utilisation at TP16", 0.035, "", "fig"),
    Known("1c", "utilisation at TP32", 0.015, "", "fig"),
    Known("1c", "performance of a GPU at TP8 over TP1", 1 / 3, "", "A"),
    Known("2", "requests of length 20 that fit", 1_800, "requests", "1"),
    Known("2", "memory that 800 requests of length 20 take", 42, "%", "1"),
    Known("2", "compute utilisation at 800 over that at the largest batch", 1.0, "×", "1"),
    Known("2", "batch at length 20K", 3, "requests", "1"),
    Known("4c", "ship query, 8K", 0.075, "ms", "1"),
    Known("4c", "ship query, 32K", 0.12, "ms", "1"),
    Known("4c", "ship query, 128K", 0.36, "ms", "1"),
    Known("4c", "ship KV, 8K", 0.581, "ms", "1"),
    Known("4c", "ship KV, 32K", 1.98, "ms", "1"),
    Known("4c", "ship KV, 128K", 7.48, "ms", "1"),
    Known("5", "utilisation at batch 100", 0.28, "", "fig"),
    Known("5", "utilisation at batch 131", 0.33, "", "fig"),
    Known("5", "utilisation at batch 156", 0.37, "", "fig"),
    Known("5", "utilisation at batch 250", 0.52, "", "fig"),
    Known("5", "utilisation at batch 443", 0.56, "", "fig"),
    Known("5", "utilisation at batch 512", 0.60, "", "fig"),
    *(
        Known("5", f"batch of {instance}, {when}", batch, "requests", "fig")
        for when, batches in (
            ("no sharing", (1, 443, 454, 103)),
            ("reactive", (1, 443, 454, 45)),
            ("proactive", (131, 443, 454, 156)),
        )
        for instance, batch in zip("ABCD", batches, strict=True)
    ),
    Known("6", "tokens moved in a step without loss", 16, "tokens", "A"),
    Known("7", "total throughput before any move", 6_500, "tok/s", "1"),
    Known("7", "total throughput at the best point", 8_800, "tok/s", "1"),
    Known("7", "gain at the best point", 8_800 / 6_500, "×", "1"),
    Known("9", "longest context over vLLM-multi", 2, "×", "A", 19),
    Known("9", "short-context throughput over vLLM-multi", 1.0, "×", "A"),
    Known("9", "short-context throughput over vLLM-single", 1.4, "×", "A", 5.3),
    Known("10a", "throughput over vllm-multi", 1.35, "×", "A", 1.73),
    Known("10b", "throughput over vllm-single", 1.4, "×", "A", 3.4),
    Known("11", "time saved against tensor parallel", 1, "%", "A", 25),
    Known("11", "speed against Ring", 7.7, "×", "A", 19.8),
    Known("12a", "loss at 16 tokens a step", 0.0, "%", "A"),
    Known("12a", "loss at 32 tokens a step", 8.6, "%", "A"),
)


def known_of(figure: str) -> tuple[Known, ...]:
    return tuple(known for known in KNOWN if known.figure == figure)


def value(figure: str, name: str) -> float:
    """Raises KeyError for what the paper's accounts do not say."""
    found = {known.name: known.value for known in known_of(figure)}
    return found[name]
