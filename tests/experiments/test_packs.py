"""Profile packs: what is shipped, what `infsim calibrate` makes of a profile, which curves a run gets, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from experiments import packs
from experiments.calibrate import calibrate
from experiments.catalogue import load_engine, load_gpu, load_link, load_model
from experiments.packs import cost_model, curves_from, load_pack, provenance, read_pack, write_pack
from experiments.predict import Query, predict
from infsim.calibrate_cli import calibrate as calibrate_command
from perfmodel.errors import InputError
from perfmodel.specs import InstanceSpec

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "profiles"
SHIPPED = ("a100", "h100", "h200")
SOURCES = {
    "a100": (
        "aiconfigurator=aiconfigurator/a100_sxm",
        "vidur=vidur/a100",
        "vidur=frontier/a800",
        "vidur=vidur/network/a100_dgx",
    ),
    "h100": ("aiconfigurator=aiconfigurator/h100_sxm",),
    "h200": ("aiconfigurator=aiconfigurator/h200_sxm",),
}
PEAK_BYTES, PEAK_FLOPS = 2.039e12, 312e12


def grid(**axes):
    columns = np.meshgrid(*axes.values(), indexing="ij")
    return pd.DataFrame({name: column.ravel() for name, column in zip(axes, columns, strict=True)})


def small_profile(decode_factor: float = 1.0) -> pd.DataFrame:
    """Times of a make-believe A100: rooflines with launches."""
    gemm = grid(m=[1, 4, 16, 64, 128, 256, 512, 2048], n=[1024, 4096, 12288], k=[1024, 4096, 8192]).assign(
        operator="gemm"
    )
    flops, weights = 2.0 * gemm.m * gemm.n * gemm.k, 2.0 * gemm.n * gemm.k
    gemm["time_s"] = 3e-6 + np.maximum(flops / (0.7 * PEAK_FLOPS), weights / (0.75 * PEAK_BYTES))
    heads = {"heads": [8, 32], "kv_heads": [8], "head_dim": [128]}
    decode = grid(rows=[1, 4, 16, 64], context_tokens=[512, 1024, 4096, 16384, 65536], **heads).assign(
        operator="decode_attention"
    )
    kv_bytes = 512.0 * decode.kv_heads * decode.rows * decode.context_tokens
    decode["time_s"] = decode_factor * (10e-6 + kv_bytes / (0.8 * PEAK_BYTES))
    prefill = grid(tokens=[128, 256, 512, 1024, 2048, 4096], prefix=[0, 512, 2048, 8192, 16384], rows=[1], **heads)
    pairs = prefill.tokens * prefill.prefix + prefill.tokens * (prefill.tokens + 1) / 2
    prefill["time_s"] = 10e-6 + 512.0 * prefill.heads * pairs / (0.6 * PEAK_FLOPS)
    prefill = prefill.assign(operator="prefill_attention", context_tokens=prefill.tokens + prefill.pop("prefix"))
    reduce = grid(num_bytes=2.0 ** np.arange(8, 28), ranks=[2, 4, 8]).assign(operator="all_reduce")
    reduce["time_s"] = 5e-6 + reduce.num_bytes / 100e9
    norm = grid(tokens=[1, 8, 64, 256, 1024, 4096], per_token=[16384.0, 32768.0])
    norm["num_bytes"] = norm.tokens * norm.pop("per_token")
    norm = norm.assign(operator="norm", time_s=3e-6 + norm.num_bytes / 1e12)
    return pd.concat([gemm, decode, prefill, reduce, norm], ignore_index=True).assign(
        gpu="a100-80gb", software="make-believe"
    )


def write_profile(path: Path, **changes: float) -> Path:
    small_profile(**changes).to_csv(path, index=False)
    return path


def run(*sources, **options) -> list[str]:
    return [str(line) for line in calibrate(sources, **options)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A pack of the small profile."""
    folder = tmp_path_factory.mktemp("pack")
    run(f"profile={write_profile(folder / 'profile.csv')}", out=folder / "mine.json")
    return folder / "mine.json"


def make_instance(gpu="a100-80gb", model="llama2-7b", dtype=None, **sizes) -> InstanceSpec:
    spec = load_gpu(gpu)
    links = load_link(spec.link), load_link("ethernet-100g")
    return InstanceSpec(load_model(model, dtype), spec, load_engine("graphs"), *links, **sizes)


# --- what is shipped ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_packs_are_small_signed_and_say_where_they_come_from(name):
    path = packs.FOLDER / f"{name}.json"
    pack = read_pack(path)
    assert path.stat().st_size < 100_000
    assert pack["sha256"] == packs.digest(pack)
    for key in ("format", "gpu", "device", "software", "date", "units", "sources", "operators", "bands"):
        assert pack[key], key
    assert all(len(sha) == 64 for source in pack["sources"] for sha in source["sha256"].values())
    for laws in pack["operators"].values():
        for law in laws:
            assert law["domain"]["ranges"] and law["source"] and 0 < law["fit"]["mape"] < 0.1
    assert "/work" not in path.read_text() and "/home" not in path.read_text()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_pack_holds_fitted_numbers_not_the_table(name):
    """Tens per family of operators; a table has thousands of times."""
    for operator, laws in load_pack(name)["operators"].items():
        for law in laws:
            assert len(re_numbers(law["parameters"])) < 100, operator


def re_numbers(value) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in re_numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in re_numbers(item)]
    return [value] if isinstance(value, float | int) else []


@pytest.mark.parametrize(
    ("name", "operator", "most"),
    [
        *((name, "gemm", 0.08) for name in SHIPPED),
        *((name, "prefill_attention", 0.05) for name in SHIPPED),
        *((name, "all_reduce", 0.05) for name in SHIPPED),
        *((name, "decode_attention", 0.05) for name in SHIPPED),
    ],
)
def test_shipped_laws_fit(name, operator, most):
    assert load_pack(name)["operators"][operator][0]["fit"]["mape"] <= most


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the public profiles are not beside the project")
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_packs_are_what_the_command_makes(name, tmp_path):
    sources = [f"{source.partition('=')[0]}={SHARED / source.partition('=')[2]}" for source in SOURCES[name]]
    run(*sources, out=tmp_path / f"{name}.json")
    again, shipped = read_pack(tmp_path / f"{name}.json"), load_pack(name)
    assert [source["sha256"] for source in again["sources"]] == [source["sha256"] for source in shipped["sources"]]
    gpu = load_gpu({"a100": "a100-80gb", "h100": "h100-80gb", "h200": "h200-141gb"}[name])
    for model, tp in (("llama2-7b", 1), ("llama2-70b", 8)):
        instance = replace(make_instance(model=model, tensor_parallel=tp), gpu=gpu, intra_link=load_link(gpu.link))
        old, new = (packs.CostModel(instance, curves_from(pack, gpu)) for pack in (shipped, again))
        for tokens in (1, 64, 1000):
            assert new.kernel_terms(tokens) == pytest.approx(old.kernel_terms(tokens), rel=0.02)
        assert new.decode_attention_s(32, 65_536) == pytest.approx(old.decode_attention_s(32, 65_536), rel=0.02)


# --- what the command makes --------------------------------------------------------------------------------------------


def test_calibrate_fits_what_the_profile_holds(made):
    pack = read_pack(made)
    assert pack["name"] == "mine"
    assert pack["software"] == "make-believe"
    assert sorted(pack["operators"]) == ["all_reduce", "decode_attention", "gemm", "norm", "prefill_attention"]
    worst = {name: laws[0]["fit"]["mape"] for name, laws in pack["operators"].items() if laws[0]["fit"]["mape"] > 0.08}
    assert not worst


def test_a_pack_comes_back_as_it_was_written(made, tmp_path):
    pack = read_pack(made)
    write_pack(pack, tmp_path / "again.json")
    assert read_pack(tmp_path / "again.json") == pack
    curves = curves_from(pack, load_gpu("a100-80gb"))
    assert curves.gemm.domain.ranges["m"] == (1, 2048)
    assert curves.streams["norm"].bytes_per_s == pytest.approx(1e12, rel=0.05)
    assert curves.streams["rope"].domain is None, "not in the profile: analytic"


def test_a_changed_profile_is_seen(made, tmp_path):
    """simulators.md: all decode times × 10 → predicted decode attention × 10, and the hash says that it is another pack."""
    profile = write_profile(tmp_path / "slow.csv", decode_factor=10.0)
    run(f"profile={profile}", out=tmp_path / "slow.json")
    plain, slow = (
        predict(Query("llama3-8b", pack=str(path), decode=["16x4096"])) for path in (made, tmp_path / "slow.json")
    )
    parts = [found["parts"]["decode_attention"]["s"] for found in (plain, slow)]
    assert parts[1] / parts[0] == pytest.approx(10.0, rel=0.02)
    assert plain["source"] != slow["source"]
    shas = [provenance(make_instance(), str(path))["sha256"] for path in (made, tmp_path / "slow.json")]
    assert shas[0] != shas[1]


def test_the_report_names_every_kind_of_slice(made, tmp_path):
    app = typer.Typer()
    app.command()(calibrate_command)
    csv = tmp_path / "profile.csv"
    small_profile().query("operator != 'decode_attention'").to_csv(csv, index=False)
    options = ["--from", f"profile={csv}", "--from", f"profile={csv}", "--out", str(tmp_path / "new.json"), "--report"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    for word in (
        "fit",
        "interpolation",
        "extrapolation",
        "other source",
        "a quarter of the (n, k)",
        "top octave of num_bytes",
    ):
        assert word in result.stdout
    for suffix in (".png", ".svg"):
        assert (tmp_path / f"new{suffix}").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to do"),
        ({"out": Path("nowhere/x.json")}, "nowhere is no folder"),
        ({"out": Path("x.json"), "gpu": "a1000"}, "unknown gpu 'a1000'"),
    ],
)
def test_calibrate_refuses(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        run(f"profile={write_profile(tmp_path / 'profile.csv')}", **options)


def test_a_gpu_that_nobody_knows_must_be_named(tmp_path):
    small_profile().assign(gpu="Tesla T4").to_csv(tmp_path / "t4.csv", index=False)
    with pytest.raises(InputError, match=r"--gpu is needed.*they say 'Tesla T4'"):
        run(f"profile={tmp_path / 't4.csv'}", out=tmp_path / "t4.json")


# --- which curves a run gets -------------------------------------------------------------------------------------------


def test_a_gpu_brings_its_own_pack():
    assert cost_model(make_instance()).curves.source.startswith("pack a100 ")
    assert cost_model(make_instance("a800-80gb")).curves.source.startswith("pack a100 "), "the same silicon"
    assert cost_model(make_instance("l40s-48gb")).curves.source == "analytic roofline of l40s-48gb"
    assert cost_model(make_instance(), "analytic").curves.source == "analytic roofline of a100-80gb"


def test_a_changed_gpu_or_wider_numbers_fall_back_to_the_roofline():
    faster = make_instance({"preset": "a100-80gb", "memory_bytes_per_s": 3e12})
    assert cost_model(faster).curves.source.startswith("analytic")
    assert cost_model(make_instance({"preset": "a100-80gb", "memory_bytes": 4 * 10**10})).curves.source.startswith(
        "pack a100"
    )
    wide = make_instance(dtype="float32")
    assert cost_model(wide).curves.source.startswith("analytic")
    with pytest.raises(InputError, match="pack a100: fitted for 2-byte numbers, llama2-7b has others"):
        cost_model(wide, "a100")


def test_the_ends_of_a_band_lie_around_the_middle():
    low, middle, high = (cost_model(make_instance(), f"a100{end}") for end in ("@low", "", "@high"))
    for tokens in (1, 64, 256, 2048):
        assert low.kernel_terms(tokens)[0] < middle.kernel_terms(tokens)[0] < high.kernel_terms(tokens)[0]
    assert low.decode_attention_s(8, 80_000) < middle.decode_attention_s(8, 80_000) < high.decode_attention_s(8, 80_000)
    assert high.kernel_terms(1024)[0] / middle.kernel_terms(1024)[0] == pytest.approx(1.2, abs=0.05), (
        "the sets disagree there"
    )


def test_predict_prints_the_band():
    found = predict(Query("llama2-7b", prefill=["1024"]))
    assert found["band"]["low_s"] < found["total_s"] < found["band"]["high_s"]
    assert found["band"]["high_s"] == pytest.approx(
        predict(Query("llama2-7b", pack="a100@high", prefill=["1024"]))["total_s"]
    )
    assert "band" not in predict(Query("llama2-7b", pack="analytic", prefill=["1024"]))


def test_predict_gives_the_papers_rates():
    """f rises with the batch towards the peak; g is the bandwidth over the KV bytes of a token and layer."""
    small, large = (predict(Query("llama2-7b", decode=[f"{rows}x1024"]))["paper"] for rows in (1, 256))
    assert small["f_flops_per_s"] < 5e12
    assert 150e12 < large["f_flops_per_s"] < 312e12
    assert 0.7 < large["g_tokens_per_s"] * 16_384 / 2.039e12 < 1.0


def test_provenance_names_hash_sources_and_errors():
    facts = provenance(make_instance())
    assert facts["pack"] == "a100" and facts["end"] == "middle" and len(facts["sha256"]) == 64
    assert facts["fit"]["gemm"][0]["mape"] < 0.08
    assert provenance(make_instance(), "analytic")["pack"] == "analytic"
    assert provenance(make_instance(), "a100@low")["end"] == "low"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a1000", "unknown pack 'a1000'; did you mean 'a100'"),
        ("a100@middle", "unknown end of a pack's band 'middle'"),
    ],
)
def test_packs_that_do_not_exist(name, message):
    with pytest.raises(InputError, match=message):
        cost_model(make_instance(), name)


def test_packs_that_were_changed_or_are_none(made, tmp_path):
    pack = json.loads(made.read_text())
    pack["operators"]["gemm"][0]["parameters"]["launch_s"] = 1.0
    (tmp_path / "edited.json").write_text(json.dumps(pack))
    with pytest.raises(InputError, match="sha256 does not match the content"):
        load_pack(str(tmp_path / "edited.json"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match="format is not infsim-pack/1"):
        load_pack(str(tmp_path / "other.json"))
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_pack(str(tmp_path / "text.json"))
    with pytest.raises(InputError, match="cannot be written"):
        write_pack(pack, tmp_path)
