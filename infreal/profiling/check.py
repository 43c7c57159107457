"""Iterations that were not profiled, measured and priced from a pack: how far a pack is to be trusted on this machine."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.catalogue import load_engine, load_gpu, load_link, load_model
from experiments.packs import cost_model
from infreal.bench.profile import device_name
from infreal.profiling.model import Subject
from infreal.profiling.table import repeat
from perfmodel.cost import CostModel
from perfmodel.specs import InstanceSpec

Lengths = tuple[tuple[int, int], ...]  # (new tokens, context with them) of each row
BATCHES: dict[str, Lengths] = {
    "1 row of 700": ((1, 700),),
    "3 rows of 900": ((1, 900),) * 3,
    "5 rows of 100 to 2,100": tuple((1, 100 + 500 * i) for i in range(5)),
    "12 rows of 300": ((1, 300),) * 12,
    "24 rows of 150": ((1, 150),) * 24,
    "a prompt of 200": ((200, 200),),
    "a chunk of 96 behind 500": ((96, 596),),
    "a chunk of 300 behind 1,500": ((300, 1800),),
    "6 rows of 400 beside a chunk of 100 behind 300": (*((1, 400),) * 6, (100, 400)),
}


@dataclass(frozen=True)
class Checked:
    name: str
    measured_s: float
    priced_s: float

    @property
    def error_frac(self) -> float:
        return self.priced_s / self.measured_s - 1

    def __str__(self) -> str:
        return (
            f"{self.name:<48} {self.measured_s * 1e3:>8.1f} ms {self.priced_s * 1e3:>8.1f} ms {self.error_frac:>+7.1%}"
        )


def check_pack(subject: Subject, model: str, dtype: str, gpu: str, pack: Path) -> Iterator[Checked]:
    cost = cost_of(model, dtype, gpu, pack)
    for name, lengths in BATCHES.items():
        measured_s = statistics.median(repeat(subject.iteration(lengths), device_name(subject.decoder.device.type)))
        yield Checked(name, measured_s, iteration_s(cost, lengths))


def cost_of(model: str, dtype: str, gpu: str, pack: Path) -> CostModel:
    spec, link = load_gpu(gpu), load_link("loopback")
    instance = InstanceSpec(load_model(model, dtype), spec, load_engine("graphs"), link, link)
    return cost_model(instance, str(pack))


def iteration_s(cost: CostModel, lengths: Lengths) -> float:
    """An iteration of rows that are all here."""
    decode = [context for new, context in lengths if new == 1]
    chunks = [(new, context - new) for new, context in lengths if new > 1]
    tokens = len(decode) + sum(new for new, _ in chunks)
    kernel_s, launch_s, host_s = cost.iteration_terms(tokens, len(decode), len(lengths))
    attention_s = cost.decode_attention_s(len(decode), sum(decode)) if decode else 0.0
    attention_s += sum(cost.prefill_attention_s(*chunk) for chunk in chunks)
    return max(kernel_s + attention_s, launch_s) + host_s
