"""The attention benchmark end to end on small cases: profile CSV, tables, picture, wrong usage."""

import csv
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from experiments.importers import own
from experiments.plots_bench import plot_attention_bench
from infreal.__main__ import main as infreal_main
from infreal.bench import attention, contenders, timing, wire
from infreal.bench.__main__ import main
from infreal.bench.contenders import Problem, Shape
from infreal.bench.profile import COLUMNS, ProfileRow
from infreal.bench.report import merge_flops_frac, report
from infreal.bench.timing import Timing
from perfmodel.errors import InputError


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One run: two models, two batch sizes, two contexts, one of which is no multiple of a block."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS_S", 0.0)
        patch.setitem(attention.COPY_BYTES, "cpu", 1 << 22)
        patch.setattr(wire, "CONTEXTS", (256, 1 << 30))
        sizes = ["--contexts", "100", "640", "--rows", "1", "2", "--models", "llama2-7b", "llama2-70b"]
        assert main(["attention", "--device", "cpu", "--kv-gib", "0.2", "--out", str(folder), *sizes]) == 0
    return folder


@pytest.fixture(scope="module")
def rows(out):
    with (out / "attention.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_profile_has_the_columns_of_the_contract_and_calibration_reads_it(out, rows):
    assert tuple(rows[0]) == COLUMNS
    assert [row["operator"] for row in rows].count("memory_copy") == 1
    table = own(out / "attention.csv").operator("decode_attention")
    assert set(zip(table["heads"], table["kv_heads"], table["rows"], table["context_tokens"], strict=True)) == {
        (heads, kv_heads, batch, context)
        for heads, kv_heads in ((32, 32), (64, 8))
        for batch in (1, 2)
        for context in (100, 640)
    }
    assert (table["num_bytes"] == 2 * table["rows"] * table["context_tokens"] * table["kv_heads"] * 128 * 4).all()


def test_every_case_has_its_rivals_and_its_merges(rows):
    count = {}
    for row in rows:
        count[row["operator"]] = count.get(row["operator"], 0) + 1
        assert float(row["time_s"]) > 0 and int(row["repeats"]) >= timing.MIN_ROUNDS
    assert count["decode_attention"] == count["decode_attention_run"] == count["sdpa_contiguous"] == 8
    assert count["sdpa_expanded"] == 4, "only grouped heads have an expanded form"
    assert count["merge"] == 8 * 3 and count["decode_attention_in_parts"] == 4 * 3
    assert count["dist_attention"] == count["ring_attention"] == count["tensor_parallel_attention"] == 1


def test_bytes_on_the_wire_are_those_of_the_formulas(rows):
    sent = {row["operator"]: int(row["num_bytes"]) for row in rows if row["link"] == "in-process"}
    shape = wire.rivals.WireShape(1, 40, 40, 128, 4)
    assert sent["dist_attention"] == wire.rivals.dist_attention_bytes(shape, 3)
    assert sent["tensor_parallel_attention"] == wire.rivals.tensor_parallel_bytes(shape, 4)
    assert sent["ring_attention"] == 4 * wire.rivals.ring_attention_bytes(shape, 256, 4)


def test_the_table_tells_the_ratios(out, rows):
    text = (out / "attention.txt").read_text()
    for words in ("decode MicroAttention", "merge of parts", "ring_attention", "93,120", "sdpa_contiguous"):
        assert words in text
    case = {"rows": "2", "context_tokens": "640", "heads": "32"}
    found = {row["operator"]: float(row["time_s"]) for row in rows if case.items() <= row.items() and not row["ranks"]}
    ratio = f"{found['decode_attention'] / found['sdpa_contiguous']:.2f}"
    assert any(ratio in line.split() for line in text.splitlines() if line.split()[:3] == ["32/32", "2", "640"])


def test_the_picture(out, tmp_path):
    paths = plot_attention_bench(out / "attention.csv", tmp_path / "pictures")
    assert [path.name for path in paths] == ["attention.png", "attention.svg"]
    svg = paths[1].read_text()
    for words in ("32/32 heads, batch 1", "64/8 heads, batch 2", "Merge of 8 parts", "copy (read + written)"):
        assert words in svg


def test_infsim_draws_the_csv(out, tmp_path):
    from infsim.__main__ import main

    copy = tmp_path / "attention.csv"
    copy.write_text((out / "attention.csv").read_text())
    assert main(["report", str(copy)]) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv", ".png", ".svg"}


def test_the_picture_says_what_a_csv_lacks(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("operator,gpu,dtype,ranks\nmerge,x,y,2\n")
    with pytest.raises(InputError, match=r"a\.csv: column operator: no row of decode_attention"):
        plot_attention_bench(path, tmp_path)
    path.write_text("operator,gpu,dtype,ranks\ndecode_attention,x,y,2\n")
    with pytest.raises(InputError, match=r"a\.csv: column heads is missing"):
        plot_attention_bench(path, tmp_path)


def test_all_contenders_compute_the_same_thing():
    """On the pool's own values, put where each expects them: what is timed is the same work."""
    shape = Shape("small", 8, 2, 64, 2, 48)
    problem = Problem(shape, torch.float32, "cpu", "torch")
    pool = problem.kv_pool[problem.run_table.long(), 0]  # [rows, blocks, 2, block_tokens, kv_heads, head_dim]
    k, v = (pool[:, :, side].flatten(1, 2).transpose(1, 2).contiguous() for side in (0, 1))
    problem.__dict__["contiguous"] = (k, v)
    mine = contenders.ours_run(problem)().output()
    for rival in (contenders.sdpa_contiguous, contenders.sdpa_expanded):
        assert torch.allclose(rival(problem)().squeeze(2), mine, atol=1e-5)


def test_a_rival_that_fails_is_told_and_left_out(monkeypatch):
    def broken(problem):
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setitem(contenders.RIVALS, "flash_attn", broken)
    said = []
    problem = Problem(Shape("small", 2, 2, 64, 1, 32), torch.float32, "cpu", "torch")
    names = [name for name, _ in attention._rival_calls(problem, 1 << 30, said.append)]
    assert names == ["sdpa_contiguous"]
    assert said == ["flash_attn is left out: RuntimeError: no kernel image"]


def test_cases_that_do_not_fit_are_not_begun_and_the_largest_come_last():
    shapes = (Shape("a", 1, 1, 64, 1, 4096), Shape("a", 1, 1, 64, 1, 1024), Shape("a", 1, 1, 64, 64, 1 << 20))
    options = SimpleNamespace(shapes=shapes, dtype=torch.float16, kv_bytes=1 << 30)
    assert attention.in_order(options) == [shapes[1], shapes[0]]


def test_no_case_is_begun_when_time_is_out(monkeypatch, capsys):
    monkeypatch.setitem(attention.COPY_BYTES, "cpu", 1 << 20)
    assert main(["attention", "--device", "cpu", "--contexts", "64", "--rows", "1", "--seconds", "1e-9"]) == 0
    assert "out of time before" in capsys.readouterr().err


def test_merge_is_less_than_a_percent_of_the_flops():
    """The paper's claim, from 1K tokens and up to 8 parts on: counted, not assumed."""
    row = ProfileRow("merge", "", "", "", context_tokens=1024, head_dim=128, ranks=8)
    assert merge_flops_frac(row) == pytest.approx(8 * (2 * 128 + 3) / (1024 * (4 * 128 + 1)))
    assert merge_flops_frac(row) < 0.01


def test_the_report_needs_nothing_but_the_copy():
    copy = ProfileRow("memory_copy", "x", "y", "float16", num_bytes=10, time_s=1.0)
    assert "x · y · float16" in report([copy])


def test_a_timing_is_a_median():
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.0, 3)
    assert Timing.of([3.0]) == Timing(3.0, 0.0, 1)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["attention", "--models", "llama"], "unknown model 'llama' (known: llama2-7b, llama2-13b, llama2-70b)"),
        (["attention", "--rows", "0"], "sizes must be above 0, not 0"),
        (["attention", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1


def test_infreal_passes_its_command_on(capsys):
    with pytest.raises(SystemExit) as stop:
        infreal_main(["bench", "attention", "--rows", "-3"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("infreal bench: sizes must be above 0")
    with pytest.raises(SystemExit) as stop:
        infreal_main(["launch"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("infreal: argument COMMAND: invalid choice: 'launch'")


def test_infreal_without_its_extra_says_what_to_install():
    """In a process in which torch cannot be found."""
    script = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
from infreal.__main__ import main
code = main(["bench"])
assert "torch" not in sys.modules
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "infreal: torch is not installed; install the extra: pip install 'infsim[real]'\n"
