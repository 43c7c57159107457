"""`infsim calibrate`: profiles in, a pack out, and a report on how far it can be trusted."""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.bands import bands
from experiments.catalogue import gpu_of_device, load_gpu, table
from experiments.fitting import Fitted, fit_all, label, short, width_of
from experiments.importers import read_profile
from experiments.machine import engine_entry, link_entry
from experiments.packs import FORMAT, Pack, write_pack
from experiments.profile import Profile
from perfmodel.basis import Domain
from perfmodel.errors import InputError
from perfmodel.specs import GpuSpec

if TYPE_CHECKING:
    from rich.table import Table

PICTURE = "fidelity"


def calibrate(
    sources: Sequence[str], out: Path | None = None, gpu: str | None = None, report: bool = False
) -> "Iterator[str | Table]":
    """Does the work of the command and yields what it prints. Raises InputError for anything that cannot be used."""
    if not (out or report):
        raise InputError("calibrate: nothing to do (--out PACK, --report, or both)")
    if out and not out.parent.is_dir():
        raise InputError(f"--out {out}: {out.parent} is no folder")
    profiles = [read_profile(source) for source in sources]
    spec = find_gpu(profiles, gpu)
    for profile in profiles:
        yield account(profile)
    notes: list[str] = []
    fitted = fit_all(profiles, spec, notes)
    yield from notes
    if profiles[0].format == "infreal":
        if report:
            raise InputError("--report: not for infreal=… (infsim compare sets a run beside its simulation)")
        yield from machine_lines(profiles[0], fitted)
    if out:
        pack = make_pack(out.stem, profiles, spec, fitted)
        write_pack(pack, out)
        yield f"{out}: {out.stat().st_size:,} bytes, operators {', '.join(pack['operators'])}"
    if report:
        from experiments import fidelity, fidelity_table, plots_fidelity

        slices = fidelity.measure(profiles, spec, fitted)
        yield fidelity_table.render(slices)
        stem = out.with_suffix("") if out else Path(PICTURE)
        yield from (str(path) for path in plots_fidelity.plot(fitted, profiles, slices, stem))


def machine_lines(profile: Profile, fitted: dict[str, list[Fitted]]) -> Iterator[str]:
    for name, laws in fitted.items():
        yield f"{name}: {laws[0].error.rows} rows, mean error {laws[0].error.mape:.1%}, P90 {laws[0].error.p90:.1%}"
    link = link_entry(profile)
    if link:
        fields = ", ".join(f"{name}: {short(value)}" for name, value in link.items())
        yield f"for the configuration: cluster.intra_link, cluster.inter_link: {{preset: loopback, {fields}}}"


def find_gpu(profiles: Sequence[Profile], gpu: str | None) -> GpuSpec:
    """The GPU named, or the one the first source says it was measured on."""
    if gpu:
        return load_gpu(gpu)
    devices = [str(name) for profile in profiles for name in profile.table["gpu"].dropna().unique()]
    found = [name for name in map(gpu_of_device, devices) if name]
    if not found and devices and devices[0].startswith("cpu"):
        found = ["cpu"]
    if not found:
        said = f"they say {devices[0]!r}" if devices else "they do not say"
        raise InputError(
            f"--gpu is needed: which GPU the sources were measured on ({said}; known: {', '.join(table('gpus'))})"
        )
    return load_gpu(found[0])


def account(profile: Profile) -> str:
    """What a source held, and what of it was left out."""
    counts = profile.table.groupby("operator", sort=False).size()
    rows = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    dropped = "".join(f"; dropped {count:,} ({reason})" for reason, count in profile.dropped.items() if count)
    return f"{label(profile)}: {rows}{dropped}"


# --- the pack ----------------------------------------------------------------------------------------------------------

UNITS = {"time": "s", "rates": "bytes/s and FLOP/s", "sizes": "bytes, tokens", "attention": "one layer on one rank"}


def make_pack(name: str, profiles: Sequence[Profile], gpu: GpuSpec, fitted: dict[str, list[Fitted]]) -> Pack:
    """The pack, not yet signed."""
    first = profiles[0]
    peaks = ("name", "memory_bytes", "peak_flops_per_s", "memory_bytes_per_s", "num_sms")
    return {
        "format": FORMAT,
        "name": name,
        "gpu": {key: getattr(gpu, key) for key in peaks},
        "device": str(first.table["gpu"].dropna().iloc[0]) if first.table["gpu"].notna().any() else gpu.name,
        "software": first.software,
        "date": datetime.date.today().isoformat(),
        "units": UNITS,
        "dtype_bytes": width_of(first.table),
        "sources": [source_entry(profile) for profile in profiles],
        "operators": {name: [law_entry(law) for law in laws] for name, laws in fitted.items()},
        "bands": bands(profiles, fitted) if first.format != "infreal" else {},
    } | ({"engine": short(engine_entry(first))} if first.format == "infreal" else {})


def source_entry(profile: Profile) -> dict[str, Any]:
    counts = profile.table.groupby("operator").size()
    return {
        "source": label(profile),
        "software": profile.software,
        "sha256": dict(profile.sha256),
        "rows": {str(name): int(count) for name, count in counts.items()},
        "dropped": {reason: count for reason, count in profile.dropped.items() if count},
    }


def law_entry(fitted: Fitted) -> dict[str, Any]:
    parameters = asdict(fitted.law)
    domain: Domain = fitted.law.domain
    del parameters["domain"]
    return {
        "law": type(fitted.law).__name__,
        "source": label(fitted.source),
        "fit": {key: short(value) for key, value in asdict(fitted.error).items()},
        "domain": {"ranges": {k: list(v) for k, v in domain.ranges.items()}, "points": dict(domain.points)},
        "parameters": short(parameters),
    }
