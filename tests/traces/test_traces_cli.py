"""`infsim traces`: describe, convert, generate."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import traces
from infsim.traces_cli import app
from perfmodel.errors import InputError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "".join(
    f"2023-11-16 18:15:{k:02d}.6805900,{100 + k},{k % 5}\r\n" for k in range(50)
)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)


def test_describe_prints_the_numbers_the_account_and_draws(write, tmp_path):
    done = run("describe", write(AZURE, "azure.csv"), "--format", "azure-2023", "--out", tmp_path / "pictures")
    assert done.exit_code == 0, done.output
    assert "50 rows read = 40 kept + 10 dropped (zero_output 10)" in done.output
    assert "40 requests in 48.0 s" in done.output
    for suffix in ("png", "svg"):
        assert (tmp_path / "pictures" / f"azure-azure-2023.{suffix}").stat().st_size > 5000


def test_describe_as_json(write):
    done = run(
        "describe", write(AZURE), "--format", "azure-2023", "--json", "--no-picture", "--window", 0, 10, "--rate-rps", 3
    )
    found = json.loads(done.output)
    assert found["num_requests"] == 8
    assert found["rate_rps"] == pytest.approx(3.0)
    assert found["manifest"]["options"]["window_s"] == [0.0, 10.0]
    assert found["manifest"]["account"]["dropped"] == {"zero_output": 10, "outside_window": 32}


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
def test_convert_then_load_is_the_same(write, tmp_path, suffix):
    path, out = write(AZURE), tmp_path / f"own.{suffix}"
    done = run("convert", path, "--format", "azure-2023", "--out", out, "--keep-failed")
    assert done.exit_code == 0, done.output
    one, two = traces.load("azure-2023", path, traces.LoadOptions(keep_failed=True)), traces.load("own", out)
    for column in ("arrival_s", "input_tokens", "output_tokens", "ids", "source_row", "flags"):
        assert np.array_equal(getattr(one, column), getattr(two, column)), column


def test_generate_with_every_kind_of_option(tmp_path):
    out = tmp_path / "own.csv"
    done = run("generate", "paper-3", "--out", out, "--num-requests", 50, "--rate-rps", 2, "--arrivals", "piecewise",
               "--step", "0:0.5", "--step", "60:1", "--output", "chat", "--seed", 4)  # fmt: skip
    assert done.exit_code == 0, done.output
    options = traces.GenerateOptions(
        num_requests=50, rate_rps=2.0, arrivals="piecewise", profile=((0, 0.5), (60, 1)), output="chat", seed=4
    )
    assert np.array_equal(traces.load("own", out).arrival_s, traces.generate("paper-3", options).arrival_s)
    done = run("generate", "fixed", "--out", out, "--arrivals", "closed", "--users", 3, "--think-s", 1.5,
               "--param", "input_tokens=512", "--param", "output_tokens=128")  # fmt: skip
    assert done.exit_code == 0, done.output
    trace = traces.load("own", out)
    assert (trace.closed.users, int(trace.input_tokens[0])) == (3, 512)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("describe", "absent.csv", "--format", "azure-2023"), "absent.csv: no such file"),
        (("describe", "absent.csv", "--format", "azure"), "unknown trace format 'azure'"),
        (("generate", "paper-1", "--out", "x.csv"), "rate_rps: arrivals poisson need a rate"),
        (
            ("generate", "paper-1", "--out", "x.txt", "--rate-rps", "1"),
            "the own format is written to a name that ends with",
        ),
        (("generate", "fixed", "--out", "x.csv", "--param", "input_tokens=many"), "--param input_tokens=many"),
        (("generate", "fixed", "--out", "x.csv", "--arrivals", "piecewise", "--step", "5"), "profile: a step is"),
    ],
)
def test_wrong_usage_is_one_line(arguments, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert isinstance(done.exception, InputError), done.output
    assert expected in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_pictures_of_workloads_without_times(tmp_path):
    from experiments.plots_traces import plot_trace

    options = {"num_requests": 30, "params": {"input_tokens": 9, "output_tokens": 9}}
    closed = traces.GenerateOptions(**options, arrivals="closed", users=2, think_s=1.0)
    saturated = traces.GenerateOptions(**options, arrivals="saturated")
    for name, chosen in (("closed", closed), ("saturated", saturated)):
        written = plot_trace(traces.generate("fixed", chosen), name, tmp_path / name)
        assert all(path.stat().st_size > 3000 for path in written)
