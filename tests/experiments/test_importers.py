"""Profile formats: what they become, what is dropped, and the one line that a bad file gets."""

from pathlib import Path

import pandas as pd
import pytest

from experiments.importers import read_profile
from experiments.profile import COLUMNS
from perfmodel.errors import InputError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "profiles"

GEMM = {
    "framework": "VLLM",
    "version": "0.14.0",
    "device": "NVIDIA A100-SXM4-80GB",
    "gemm_dtype": ["bfloat16", "fp8", "bfloat16"],
    "m": [1, 1, 2],
    "n": [512, 512, 512],
    "k": [1024, 1024, 1024],
    "latency": [0.005, 0.003, 0.006],
}
DECODE = {
    "framework": "VLLM",
    "version": "0.14.0",
    "device": "NVIDIA A100-SXM4-80GB",
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "batch_size": [4, 8],
    "isl": [1, 1],
    "step": [1023, 2047],
    "num_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "latency": [0.03, 0.06],
}
LAYER = {
    "n_head": 32,
    "n_kv_head": 8,
    "n_embd": 4096,
    "n_expanded_embd": 14336,
    "num_tokens": [1, 128],
    "num_tensor_parallel_workers": 2,
} | {
    f"time_stats.{name}.median": [0.01, 0.02]
    for name in (
        *("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "input_layernorm"),
        *("post_attention_layernorm", "add", "attn_rope", "mlp_act", "emb"),
    )
}
ATTENTION = {
    "is_prefill": [False, True],
    "batch_size": 2,
    "prefill_chunk_size": [0, 512],
    "kv_cache_size": [1024, 256],
    "n_q_head": 64,
    "n_kv_head": 8,
    "n_embd": 8192,
    "num_tensor_parallel_workers": 4,
    "time_stats.attn_decode.median": [0.05, 0.0],
    "time_stats.attn_prefill.median": [None, 0.2],
}
OWN = {
    "operator": ["gemm", "norm"],
    "m": [1, None],
    "n": [64, None],
    "k": [64, None],
    "tokens": [None, 8],
    "num_bytes": [None, 640],
}


def write(path: Path, columns: dict) -> Path:
    frame = pd.DataFrame(columns)
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return path


def test_aiconfigurator_keeps_16_bit_and_counts_the_rest(tmp_path):
    write(tmp_path / "gemm_perf.parquet", GEMM)
    write(tmp_path / "generation_attention_perf.parquet", DECODE)
    write(tmp_path / "nccl_perf.parquet", {"latency": [1.0]})
    profile = read_profile(f"aiconfigurator={tmp_path}")
    assert list(profile.table.columns) == list(COLUMNS)
    assert profile.software == "VLLM 0.14.0"
    assert profile.dropped["not 16-bit"] == 1
    assert sorted(profile.sha256) == ["gemm_perf.parquet", "generation_attention_perf.parquet"]
    gemm = profile.operator("gemm")
    assert gemm[["m", "n", "k"]].to_numpy().tolist() == [[1, 512, 1024], [2, 512, 1024]]
    assert gemm["time_s"].tolist() == pytest.approx([5e-6, 6e-6])
    decode = profile.operator("decode_attention")
    assert decode["context_tokens"].tolist() == [1024, 2048], "the cache and the new token"
    assert decode["rows"].tolist() == [4, 8]


def test_vidur_shapes_follow_the_model_and_its_ranks(tmp_path):
    profile = read_profile(f"vidur={write(tmp_path / 'mlp.csv', LAYER)}")
    shapes = profile.operator("gemm")[["n", "k"]].drop_duplicates().to_numpy().tolist()
    assert shapes == [[(16 + 2 * 4) * 128, 4096], [4096, 2048], [14336, 4096], [4096, 7168]]
    activation = profile.operator("activation")
    assert activation["num_bytes"].tolist() == [2 * tokens * 3 * 7168 for tokens in (1, 128)]
    assert len(profile.operator("norm")) == 4, "two a layer"


def test_vidur_attention_divides_heads_and_counts_the_chunk(tmp_path):
    profile = read_profile(f"vidur={write(tmp_path / 'attention.csv', ATTENTION)}")
    decode, prefill = profile.operator("decode_attention"), profile.operator("prefill_attention")
    assert decode[["rows", "context_tokens", "heads", "kv_heads", "head_dim"]].to_numpy().tolist() == [
        [2, 1024, 16, 2, 128]
    ]
    assert prefill[["tokens", "context_tokens"]].to_numpy().tolist() == [[512, 768]]
    assert prefill["time_s"].tolist() == pytest.approx([200e-6])


def test_vidur_collectives_across_nodes_are_left_out(tmp_path):
    columns = {
        "time_stats.all_reduce.median": [0.1, 0.2],
        "size": [1024, 1024],
        "num_workers": [2, 2],
        "devices_per_node": [2, 1],
    }
    profile = read_profile(f"vidur={write(tmp_path / 'all_reduce.csv', columns)}")
    assert profile.operator("all_reduce")[["num_bytes", "ranks", "time_s"]].to_numpy().tolist() == [[1024, 2, 1e-4]]


def test_our_own_format_needs_no_more_than_an_operator_needs(tmp_path):
    path = write(tmp_path / "profile.csv", OWN | {"time_s": [1e-5, 2e-5], "software": "torch 2.13"})
    profile = read_profile(f"profile={path}")
    assert profile.software == "torch 2.13"
    assert profile.operator("norm")[["tokens", "num_bytes"]].to_numpy().tolist() == [[8, 640]]


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        (
            "aiconfigurator",
            {k: v for k, v in GEMM.items() if k != "latency"},
            r"gemm_perf.parquet: column latency is missing",
        ),
        (
            "aiconfigurator",
            GEMM | {"latency": [0.1, 0.1, -1.0]},
            r"row 4: latency: .*-1.0.* \(a number above 0 is expected\)",
        ),
        ("aiconfigurator", GEMM | {"m": [1, 1, 0]}, r"row 4: m: .*0.*above 0"),
        ("vidur", {k: v for k, v in LAYER.items() if k != "n_head"}, "column n_head is missing"),
        ("vidur", LAYER | {"time_stats.add.median": [0.1, "fast"]}, r"row 3: time_stats.add.median: 'fast'"),
        ("vidur", {"a": [1]}, "none of the columns time_stats.attn_pre_proj.median"),
        ("profile", OWN | {"time_s": [1e-5, None]}, r"row 3: time_s: .*nan"),
        ("profile", OWN | {"time_s": [1e-5, 1e-5], "n": [None, None]}, r"row 2: n: .*nan"),
        ("profile", OWN, "column time_s is missing"),
        ("profile", OWN | {"time_s": 1e-5, "time_ms": 1}, "unknown column of .*time_ms.*did you mean 'time_s'"),
    ],
)
def test_bad_files_are_named_by_row_and_column(tmp_path, name, columns, message):
    path = write(tmp_path / ("gemm_perf.parquet" if name == "aiconfigurator" else "some.csv"), columns)
    with pytest.raises(InputError, match=message) as error:
        read_profile(f"{name}={path}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("aiconfigurator", "FORMAT=PATH is expected"),
        ("vidor=x.csv", "unknown profile format 'vidor'; did you mean 'vidur'"),
        ("vidur=nowhere", "no such file, nor a folder with .csv files"),
        ("aiconfigurator=nowhere", "no such file, nor a folder with .parquet files"),
    ],
)
def test_wrong_sources(source, message):
    with pytest.raises(InputError, match=message):
        read_profile(source)


def test_files_that_are_not_what_they_say(tmp_path):
    (tmp_path / "gemm_perf.parquet").write_text("no parquet")
    with pytest.raises(InputError, match="not Parquet"):
        read_profile(f"aiconfigurator={tmp_path}")
    (tmp_path / "mlp.csv").write_text("")
    with pytest.raises(InputError, match="not CSV"):
        read_profile(f"vidur={tmp_path}")
    (tmp_path / "mlp.csv").write_text("a,b\n")
    with pytest.raises(InputError, match="no rows"):
        read_profile(f"vidur={tmp_path}")
    (tmp_path / "mlp.csv").unlink()
    (tmp_path / "gemm_perf.parquet").rename(tmp_path / "other.parquet")
    with pytest.raises(InputError, match=r"none of gemm_perf\.parquet"):
        read_profile(f"aiconfigurator={tmp_path}")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public profiles are not beside the project")
@pytest.mark.parametrize(
    ("source", "rows"),
    [
        ("aiconfigurator=aiconfigurator/a100_sxm", {"gemm": 9240, "decode_attention": 5431, "all_reduce": 69}),
        ("aiconfigurator=aiconfigurator/h100_sxm", {"gemm": 9240, "decode_attention": 5435, "prefill_attention": 5457}),
        ("vidur=vidur/a100", {"gemm": 15_648, "decode_attention": 10_240, "prefill_attention": 4418, "norm": 7824}),
        ("vidur=frontier/a800", {"gemm": 1044, "decode_attention": 10_320, "prefill_attention": 652}),
        ("vidur=vidur/network/a100_dgx", {"all_reduce": 2982, "send_recv": 994}),
    ],
)
def test_public_profiles_are_read_whole(source, rows):
    name, _, path = source.partition("=")
    profile = read_profile(f"{name}={SHARED / path}")
    counts = profile.table.groupby("operator").size()
    assert {operator: int(counts[operator]) for operator in rows} == rows
    assert profile.table["time_s"].min() > 0
