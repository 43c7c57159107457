"""Profile packs: fitted laws of one GPU in one small file, and the cost model made of them.

A pack is JSON: format and version, name, GPU with the peaks it was fitted under, software, date, sources with hashes, units,
and for every operator its laws with domain, fit error and source; bands say by how much data sets disagree. `sha256` is that
of the rest. Shipped ones lie in data/packs; a configuration may also name a file.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from perfmodel.basis import Domain
from perfmodel.cost import CostModel
from perfmodel.curves import ENDS, Band, Curves, analytic_curves
from perfmodel.errors import InputError, unknown
from perfmodel.laws.allreduce import KnotAllReduce, Knots, RingAllReduce
from perfmodel.laws.attention import PrefillLaw, StreamedDecode
from perfmodel.laws.flash2 import Flash2Decode
from perfmodel.laws.gemm import Tile, TileGemm
from perfmodel.laws.stream import StreamLaw
from perfmodel.laws.whole import WholeChunks, WholeDecode, WholeKnots
from perfmodel.specs import GpuSpec, InstanceSpec

ANALYTIC = "analytic"
FOLDER = Path(__file__).parent / "data" / "packs"
FORMAT = "infsim-pack/1"
Pack = dict[str, Any]


def __getattr__(name: str) -> dict[str, str]:
    """PACKS: name → one line (read on first use)."""
    if name == "PACKS":
        return listing()
    raise AttributeError(name)


@cache
def listing() -> dict[str, str]:
    """The packs that can be named, one line each."""
    found = {path.stem: about(read_pack(path)) for path in sorted(FOLDER.glob("*.json"))}
    return found | {ANALYTIC: "no measurement: roofline of the data sheet with documented efficiencies and floors"}


def about(pack: Pack) -> str:
    return f"{pack['gpu']['name']}: {pack['software']}; {', '.join(pack['operators'])}; made {pack['date']}"


def cost_model(instance: InstanceSpec, pack: str | None = None, scale: Mapping[str, float] | None = None) -> CostModel:
    """The cost model of an instance.

    `pack`: a shipped name, a file, or "analytic"; with "@low" or "@high" behind it, an end of its band. None: the GPU's own
    where it was fitted under the same peaks and width of numbers, else analytic.
    """
    return CostModel(with_engine(instance, pack), curves_of(instance, pack), dict(scale or {}))


def with_engine(instance: InstanceSpec, pack: str | None) -> InstanceSpec:
    """A machine's own pack knows the host side, too: it takes the place of the configured engine's."""
    name = (pack or instance.gpu.pack or ANALYTIC).partition("@")[0]
    engine = {} if name == ANALYTIC else load_pack(name).get("engine")
    return replace(instance, engine=replace(instance.engine, **engine)) if engine else instance


def curves_of(instance: InstanceSpec, pack: str | None) -> Curves:
    name, _, end = (pack or instance.gpu.pack or ANALYTIC).partition("@")
    if end and end not in ENDS:
        raise unknown("end of a pack's band", end, ENDS)
    curves = analytic_curves(instance.gpu, instance.model.dtype_bytes)
    if name != ANALYTIC:
        found = load_pack(name)
        if fits(found, instance):
            curves = curves_from(found, instance.gpu)
        elif pack:
            width = found["dtype_bytes"]
            raise InputError(f"pack {name}: fitted for {width}-byte numbers, {instance.model.name} has others")
    return curves.at_end(end) if end else curves


def fits(pack: Pack, instance: InstanceSpec) -> bool:
    """Same width of numbers. A GPU's own pack must also have been fitted under the peaks the GPU has now."""
    same_width: bool = pack["dtype_bytes"] == instance.model.dtype_bytes
    return same_width and (pack["name"] != instance.gpu.pack or same_peaks(pack["gpu"], instance.gpu))


def same_peaks(recorded: Mapping[str, Any], gpu: GpuSpec) -> bool:
    names = ("peak_flops_per_s", "memory_bytes_per_s")
    return all(recorded[name] == getattr(gpu, name) for name in names)


def provenance(instance: InstanceSpec, pack: str | None = None) -> dict[str, Any]:
    """What a manifest says of the curves: pack, hash, software, sources, fit error of every operator."""
    name, _, end = (pack or instance.gpu.pack or ANALYTIC).partition("@")
    if name == ANALYTIC or not fits(load_pack(name), instance):
        return {"pack": ANALYTIC, "source": curves_of(instance, pack).source}
    found = load_pack(name)
    kept = ("name", "sha256", "software", "date", "sources")
    errors = {name: [law["fit"] for law in laws] for name, laws in found["operators"].items()}
    return {"pack": name, "end": end or "middle", "fit": errors} | {key: found[key] for key in kept}


# --- files -------------------------------------------------------------------------------------------------------------


def load_pack(name: str) -> Pack:
    """A shipped pack by name, or a file. Raises InputError for neither, or for a file that is not a whole pack."""
    shipped = FOLDER / f"{name}.json"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        raise unknown("pack", name, listing())
    return _load(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=32)
def _load(path: Path, changed_ns: int) -> Pack:
    return read_pack(path)


def read_pack(path: Path) -> Pack:
    """Raises InputError for a file that is not a pack, or was changed by hand."""
    try:
        pack: Pack = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"pack {path}: cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(pack, dict) or pack.get("format") != FORMAT:
        raise InputError(f"pack {path}: format is not {FORMAT}")
    if pack.get("sha256") != digest(pack):
        raise InputError(f"pack {path}: sha256 does not match the content (changed after infsim calibrate wrote it)")
    return pack


def write_pack(pack: Pack, path: Path) -> None:
    """Signed and written. Raises InputError where the file cannot be written."""
    signed = {**pack, "sha256": digest(pack)}
    try:
        path.write_text(json.dumps(signed, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"pack {path}: cannot be written ({error.strerror})") from None


def digest(pack: Pack) -> str:
    """sha256 of everything but itself."""
    content = {key: value for key, value in pack.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- from a pack to curves ---------------------------------------------------------------------------------------------


def curves_from(pack: Pack, gpu: GpuSpec) -> Curves:
    """A pack's laws; what it does not hold stays analytic."""
    operators = pack["operators"]
    analytic = analytic_curves(gpu, pack["dtype_bytes"])
    fitted = {name: [make_law(law) for law in laws] for name, laws in operators.items()}
    streams = {name: fitted[name][0] if name in fitted else law for name, law in analytic.streams.items()}
    return replace(
        analytic,
        gemm=fitted["gemm"][0] if "gemm" in fitted else analytic.gemm,
        streams=streams,
        decode=tuple(fitted.get("decode_attention", analytic.decode)),
        prefill=fitted["prefill_attention"][0] if "prefill_attention" in fitted else analytic.prefill,
        all_reduce=fitted["all_reduce"][0] if "all_reduce" in fitted else analytic.all_reduce,
        layer=fitted["layer"][0] if "layer" in fitted else None,
        head=fitted["head"][0] if "head" in fitted else None,
        source=f"pack {pack['name']} {pack['sha256'][:8]}",
        bands={
            name: Band(*(tuple(band[key]) for key in ("at", "low", "high"))) for name, band in pack["bands"].items()
        },
    )


def make_law(entry: Mapping[str, Any]) -> Any:
    """One law of a pack: parameters by name, domain."""
    kind = entry["law"]
    if kind not in LAWS:
        raise unknown("law of a pack", kind, LAWS)
    law = LAWS[kind]
    known = {item.name for item in fields(law)} - {"domain"}
    parameters = {name: plain(name, value) for name, value in entry["parameters"].items() if name in known}
    return law(**parameters, domain=make_domain(entry["domain"]))


def plain(name: str, value: Any) -> Any:
    """A parameter as the law holds it: lists are tuples, nested records their own classes."""
    if name == "tiles":
        return tuple(Tile(**tile) for tile in value)
    if name == "knots":
        return tuple(Knots(tuple(knot["num_bytes"]), tuple(knot["time_s"])) for knot in value)
    if name == "other":
        return RingAllReduce(**value)
    return tuple(value) if isinstance(value, list) else value


def make_domain(entry: Mapping[str, Any]) -> Domain:
    ranges = {name: (low, high) for name, (low, high) in entry["ranges"].items()}
    return Domain(ranges, {name: tuple(values) for name, values in entry.get("points", {}).items()})


LAWS: dict[str, type[Any]] = {
    law.__name__: law
    for law in (
        *(TileGemm, StreamedDecode, Flash2Decode, PrefillLaw, StreamLaw, KnotAllReduce),
        *(WholeKnots, WholeDecode, WholeChunks),
    )
}
