"""Rows of the profile CSV (design.md §5): what was measured, where, with what. Calibration reads the file."""

import csv
import platform
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path

import torch


@dataclass(frozen=True)
class ProfileRow:
    """One measurement. What does not apply stays None and is written empty. Bytes are read plus written, or sent."""

    operator: str
    gpu: str
    software: str
    dtype: str
    tensor_parallel: int | None = None
    rows: int | None = None
    tokens: int | None = None
    context_tokens: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    m: int | None = None
    n: int | None = None
    k: int | None = None
    num_bytes: int | None = None
    ranks: int | None = None
    link: str | None = None
    time_s: float | None = None
    time_s_std: float | None = None
    repeats: int | None = None


COLUMNS = tuple(field.name for field in fields(ProfileRow))


def write_profile(path: Path, rows: list[ProfileRow]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in rows:
            values = (getattr(row, name) for name in COLUMNS)
            writer.writerow(["" if value is None else value for value in values])


def device_name(device: str) -> str:
    """The GPU's name, or the processor's and how many threads torch uses."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"cpu {_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def software(backend: str) -> str:
    ours = f"triton {version('triton')}, " if backend == "triton" else ""
    cuda = f", cuda {torch.version.cuda}" if torch.version.cuda else ""
    return f"infreal/{backend}, {ours}torch {torch.__version__}{cuda}"
