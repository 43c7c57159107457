"""Names that a configuration or a command may use, one line each. Owns the two registries and loads nothing else."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """How a trace format is read: the module of `traces.formats` that does it, and what its clock is.

    `ticks_per_s` is the unit of the file's times, `tick_s` the step that its clock may be coarser than (None: none known).
    """

    module: str
    text: str
    ticks_per_s: float = 1.0
    tick_s: float | None = None
    is_folder: bool = False


READERS: dict[str, Format] = {
    "azure-2023": Format("azure", "Azure LLM inference 2023, CSV, naive times with 7 fractional digits", 1e9),
    "azure-2024": Format("azure", "Azure LLM inference 2024, CSV, times with an offset, tens of millions of rows", 1e9),
    "azure-2025": Format("azure", "Azure LLM inference 2025 (multimodal), CSV, images are noted and not used", 1e9),
    "mooncake": Format(
        "mooncake", "Mooncake, JSONL, times in ms; prefix hashes are kept and not used", 1e3, tick_s=3.0
    ),
    "burstgpt": Format("burstgpt", "BurstGPT v1 and v3, CSV, times in whole seconds", tick_s=1.0),
    "bailian": Format("bailian", "Alibaba Bailian usage traces, JSONL, times in s, input includes the history"),
    "servegen": Format(
        "servegen", "ServeGen, a folder of clients: requests are drawn from them (seeded)", is_folder=True
    ),
    "sharegpt": Format("sharegpt", "ShareGPT conversations, JSON, no times; lengths need a tokenizer file"),
    "vidur": Format("vidur", "Vidur, CSV arrived_at (s), num_prefill_tokens, num_decode_tokens"),
    "own": Format("own", "the canonical row: arrival_s, input_tokens, output_tokens, …; CSV or Parquet"),
}

# What gives a format away, in lower case; one that has more comes before one that has less.
_SIGNATURES = {
    "azure-2025": ("timestamp", "numimages", "contexttokens", "generatedtokens"),
    "azure-2023": ("timestamp", "contexttokens", "generatedtokens"),
    "burstgpt": ("timestamp", "request tokens", "response tokens"),
    "vidur": ("num_prefill_tokens", "num_decode_tokens"),
    "own": ("arrival_s", "input_tokens", "output_tokens"),
    "bailian": ("chat_id", "timestamp", "input_length", "output_length"),
    "mooncake": ("timestamp", "input_length", "output_length"),
    "sharegpt": ("conversations",),
}

FORMATS: dict[str, str] = {name: reader.text for name, reader in READERS.items()}

_PAPER_RANGES = ("1–60K", "1–60K", "1–60K", "1–200K", "1–400K", "1–600K", "1–1000K", "1–1500K", "1–2000K")

GENERATORS: dict[str, str] = {
    **{f"paper-{i}": f"our reconstruction of the paper's trace {i}: context {r}" for i, r in enumerate(_PAPER_RANGES)},
    "lognormal": "context from a truncated log-normal: mean_tokens, sd_tokens (or mu, sigma), min_tokens, max_tokens",
    "loguniform-mix": "context from a truncated log-normal with a log-uniform tail: plus tail_frac, tail_max_tokens",
    "fixed": "every request the same: input_tokens, output_tokens",
    "empirical-azure-conv": "input and output drawn jointly as in Azure 2023 conversation",
    "empirical-azure-code": "input and output drawn jointly as in Azure 2023 code",
    "empirical-mooncake-conversation": "input and output drawn jointly as in Mooncake conversation (up to 126K tokens)",
    "empirical-mooncake-synthetic": "input and output drawn jointly as in Mooncake synthetic (up to 191K tokens)",
    "empirical-servegen-deepseek-r1": "input and output drawn jointly as by ServeGen's clients of DeepSeek-R1",
}


def fitting_format(fields: list[str]) -> str:
    """A hint where the fields are those of another format."""
    fits = [name for name, signature in _SIGNATURES.items() if set(signature) <= set(fields)]
    return f"; it looks like format {fits[0]}" if fits else ""
