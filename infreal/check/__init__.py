"""The parts of `python -m infreal.gpu_check`. They need torch, triton, numpy and this repository alone."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was checked, whether it held, and the number that says so."""

    what: str
    holds: bool
    found: str

    def __str__(self) -> str:
        return f"{'ok    ' if self.holds else 'FAILED'} {self.what}: {self.found}"
