"""ServeGen: requests drawn from clients."""

import json

import numpy as np
import pytest

import traces
from perfmodel.errors import InputError
from traces import LoadOptions
from traces.formats.servegen import read_clients


@pytest.fixture
def folder(tmp_path):
    """Two clients: one with 120 bursty requests in the second window, one steady with 60 in each of three."""

    def lengths(inputs, outputs):
        return {"input_tokens": str(inputs), "output_tokens": str(outputs), "reason_ratio": "{}"}

    (tmp_path / "chunk-0-trace.csv").write_text("0,0,0,,0,0\n600,0.2,5,Gamma,0.04,9\n1200,0,0,,0,0\n")
    (tmp_path / "chunk-0-dataset.json").write_text(
        json.dumps({"0": lengths({5: 0.5, 9: 0.5}, {100: 1.0}), "1200": lengths({}, {})})
    )
    (tmp_path / "chunk-7-trace.csv").write_text("0,0.1,1,Weibull,1.0,9\n600,0.1,1,Gamma,1,9\n1200,0.1,1,Gamma,1,9\n")
    both = {"0": lengths({50: 1.0}, {60: 1.0}), "1200": lengths({51: 1.0}, {61: 1.0})}
    (tmp_path / "chunk-7-dataset.json").write_text(json.dumps(both))
    return tmp_path


def test_counts_windows_lengths_and_sessions(folder):
    trace = traces.load("servegen", folder)
    assert len(trace) == 120 + 180
    assert set(trace.session.tolist()) == {0, 7}
    client = trace.session == 0
    assert set(trace.input_tokens[client].tolist()) == {5, 9}
    assert np.mean(trace.input_tokens[client] == 5) == pytest.approx(0.5, abs=0.15)
    assert set(trace.output_tokens[client].tolist()) == {100}
    assert np.ptp(trace.arrival_s[client]) < 600, "all of its requests in its only busy window"
    steady = trace.session == 7
    assert np.count_nonzero(trace.input_tokens[steady] == 51) == 60, "the last window takes the later lengths"
    assert trace.account.inversions == 0
    assert "drawn from 2 ServeGen clients, seed 0" in trace.account.notes


def test_bursty_windows_are_bursty(folder):
    client = traces.load("servegen", folder).session
    trace = traces.load("servegen", folder)
    bursty, steady = (np.diff(trace.arrival_s[client == k]) for k in (0, 7))
    assert bursty.std() / bursty.mean() > 2.5
    assert steady.std() / steady.mean() == pytest.approx(1.0, abs=0.3)


def test_seeds_rates_and_windows(folder):
    first, same, other = (traces.load("servegen", folder, LoadOptions(seed=seed)) for seed in (3, 3, 4))
    assert np.array_equal(first.arrival_s, same.arrival_s)
    assert not np.array_equal(first.arrival_s, other.arrival_s)
    slow, fast = (traces.load("servegen", folder, LoadOptions(rate_rps=rate)) for rate in (1.0, 8.0))
    assert np.array_equal(slow.arrival_s / 8.0, fast.arrival_s)
    assert np.array_equal(slow.input_tokens, fast.input_tokens)
    cut = traces.load("servegen", folder, LoadOptions(window_s=(0, 500)))
    assert set(cut.session.tolist()) == {7}


def test_a_client_does_not_change_another(folder):
    both = traces.load("servegen", folder)
    for name in ("chunk-0-trace.csv", "chunk-0-dataset.json"):
        (folder / name).unlink()
    alone = traces.load("servegen", folder)
    np.testing.assert_allclose(np.diff(alone.arrival_s), np.diff(both.arrival_s[both.session == 7]), atol=1e-9)


def test_the_hash_covers_every_file(folder):
    before = traces.load("servegen", folder).source["sha256"]
    path = folder / "chunk-7-dataset.json"
    path.write_text(path.read_text().replace("51", "52"))
    assert traces.load("servegen", folder).source["sha256"] != before


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("chunk-0-trace.csv", "0,0.1,1,Pareto,1,1\n", "line 1, column pattern: 'Pareto'"),
        ("chunk-0-trace.csv", "0,0.1,1,Gamma,0,1\n", "column pattern: 'Gamma' with shape 0"),
        ("chunk-0-trace.csv", "0,0.1,1,Gamma,1,1\n0,0.1,1,Gamma,1,1\n", "window starts do not ascend"),
        ("chunk-0-trace.csv", "0,often,1,Gamma,1,1\n", "line 1, column rate: 'often'"),
        ("chunk-0-trace.csv", "0,0.1\n", "line 1: 2 fields"),
        ("chunk-0-trace.csv", "0,1e9,1,Gamma,1,1\n", "at most 100,000,000 are drawn"),
        ("chunk-0-dataset.json", "{}", "requests at 600 s but no length distribution"),
        ("chunk-0-dataset.json", "[1]", "not ServeGen length tables"),
        (
            "chunk-0-dataset.json",
            '{"0": {"input_tokens": "{5.5: 1}", "output_tokens": "{5: 1}"}}',
            "a length is not a whole number",
        ),
        (
            "chunk-0-dataset.json",
            '{"0": {"input_tokens": "{5: -1}", "output_tokens": "{5: 1}"}}',
            "a share is negative",
        ),
        (
            "chunk-0-dataset.json",
            '{"0": {"input_tokens": "print(1)", "output_tokens": "{}"}}',
            "not ServeGen length tables",
        ),
    ],
)
def test_damaged_folders(folder, name, content, expected):
    (folder / name).write_text(content)
    with pytest.raises(InputError) as caught:
        traces.load("servegen", folder)
    assert expected in str(caught.value)
    assert name in str(caught.value) or "at most" in expected


def test_real_clients_give_the_counts_of_the_file_and_their_lengths(real):
    path = real("servegen/reason/deepseek-r1")
    clients = read_clients(path, {})
    trace = traces.load("servegen", path)
    rates = np.concatenate([np.loadtxt(file, delimiter=",", usecols=1) for file in path.glob("*-trace.csv")])
    assert len(trace) == round(600 * rates.sum())
    weighted, total = 0.0, 0
    for client in clients:
        for window in client.windows:
            lengths, _ = client.lengths_at(window.begin_s)
            weights = np.diff(lengths.cumulative, prepend=0.0)
            weighted += window.num_requests * float((lengths.tokens * weights).sum() / weights.sum())
            total += window.num_requests
    assert trace.input_tokens.mean() == pytest.approx(weighted / total, rel=0.02)
