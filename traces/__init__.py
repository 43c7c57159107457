"""Workloads: reading, checking and generating them. Owns every trace format; knows nothing of models, clusters or drivers.

    trace = traces.load("azure-2023", "conv.csv", traces.LoadOptions(window_s=(0.0, 600.0), rate_rps=4.0))
    trace = traces.generate("paper-3", traces.GenerateOptions(num_requests=2000, rate_rps=4.0, output="chat"))

Importing this module costs numpy only; a reader's or generator's own needs (pyarrow, rich, tokenizers) come with its first use.
"""

import os

from traces.catalogue import FORMATS, GENERATORS
from traces.options import GenerateOptions, LoadOptions
from traces.trace import Account, ClosedLoop, Trace

__all__ = [
    "FORMATS",
    "GENERATORS",
    "Account",
    "ClosedLoop",
    "GenerateOptions",
    "LoadOptions",
    "Trace",
    "generate",
    "load",
    "write_own",
]

_AS_RECORDED = LoadOptions()


def load(format: str, path: str | os.PathLike[str], options: LoadOptions = _AS_RECORDED) -> Trace:
    """The requests of `path`, read as `format` (a key of `FORMATS`); raises `InputError` naming file, line, column, value."""
    from traces.loading import load_trace

    return load_trace(format, path, options)


def generate(name: str, options: GenerateOptions) -> Trace:
    """`options.num_requests` requests of the generator `name` (a key of `GENERATORS`); raises `InputError`."""
    from traces.generators import generate_trace

    return generate_trace(name, options)


def write_own(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes the canonical rows to `path` (`.csv`, `.csv.gz`, `.parquet`); read back as `own` they are the same bit for bit."""
    from traces.export import write_own_file

    write_own_file(trace, path)
