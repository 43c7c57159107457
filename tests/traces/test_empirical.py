"""The joint tables against the real files they were made from."""

import json
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

import traces
from traces import GenerateOptions
from traces.tables import SOURCES, joint_counts, joint_table, main, rank_correlation

PERCENTILES = (5, 10, 25, 50, 75, 90, 95, 99)
DRAWS = 400_000


@pytest.fixture(scope="module", params=list(SOURCES))
def pair(request, real):
    """A real trace, and draws from its table."""
    source = SOURCES[request.param]
    recorded = traces.load(source.format, real(source.path))
    drawn = traces.generate(f"empirical-{request.param}", GenerateOptions(num_requests=DRAWS))
    return recorded, drawn, request.param


@pytest.mark.parametrize("side", ["input_tokens", "output_tokens"])
def test_quantiles_within_two_percent(pair, side):
    recorded, drawn, _ = pair
    wanted, found = (np.percentile(getattr(t, side), PERCENTILES, method="inverted_cdf") for t in (recorded, drawn))
    # Below 50 tokens two percent are less than one token, the step of the distribution.
    assert np.all(np.abs(found - wanted) <= np.maximum(0.02 * wanted, 1.0)), (wanted, found)


def test_moments_rate_and_rank_correlation(pair):
    recorded, drawn, _ = pair
    for side in ("input_tokens", "output_tokens"):
        assert getattr(drawn, side).mean() == pytest.approx(getattr(recorded, side).mean(), rel=0.02)
        assert getattr(drawn, side).std() == pytest.approx(getattr(recorded, side).std(), rel=0.04)
        assert getattr(drawn, side).max() <= getattr(recorded, side).max()
    wanted, found = (rank_correlation(t.input_tokens, t.output_tokens) for t in (recorded, drawn))
    assert found == pytest.approx(wanted, abs=0.05)
    assert drawn.mean_rate_rps == pytest.approx(recorded.mean_rate_rps, rel=0.01), "the recorded rate is the default"


def test_the_committed_table_is_what_the_script_makes(pair):
    recorded, _, name = pair
    committed = json.loads((files("traces") / "data" / f"{name}.json").read_text())
    assert json.loads(json.dumps(joint_table(recorded, SOURCES[name]))) == committed


def test_tables_hold_statistics_and_say_where_from():
    for name in SOURCES:
        table = json.loads((files("traces") / "data" / f"{name}.json").read_text())
        assert {"source", "sha256", "num_requests"} <= table.keys()
        assert np.array(table["joint_count"]).shape == (20, 20)
        assert np.array(table["joint_count"]).sum() == table["num_requests"]
        assert np.all(np.diff(table["input_tokens"]) >= 0)
        assert len(table["input_tokens"]) == len(table["probabilities"]) < 300


def test_joint_counts_have_flat_margins_whatever_the_ties():
    inputs = np.repeat([7, 9], 500)
    counts = joint_counts(inputs, np.arange(1000))
    assert counts.sum(axis=0) == pytest.approx(50)
    assert counts.sum(axis=1) == pytest.approx(50)
    assert counts[:10, :10].sum() == 500, "the order between different lengths is kept"


def test_a_table_catches_a_strong_dependence():
    """Were input and output drawn independently, this would fail."""
    from traces.generators.empirical import JointTable

    rng = np.random.default_rng(5)
    inputs = rng.integers(1, 5000, 20_000)
    outputs = np.maximum(inputs // 10 + rng.integers(-20, 20, 20_000), 1)
    trace = traces.Trace(
        np.arange(20_000.0), inputs, outputs, np.arange(20_000), traces.Account(20_000, 20_000), {"sha256": ""}
    )
    raw = joint_table(trace, replace(SOURCES["azure-conv"], text="made up"))
    columns = (np.array(raw[key], dtype=float) for key in ("probabilities", "input_tokens", "output_tokens"))
    counts = np.array(raw["joint_count"], dtype=float)
    table = JointTable(*columns, counts / counts.sum(), 1.0, "made up")
    drawn = table.draw(*(rng.random(50_000) for _ in range(3)))
    assert rank_correlation(*drawn) == pytest.approx(rank_correlation(inputs, outputs), abs=0.05)
    assert rank_correlation(inputs, outputs) > 0.95


def test_the_script_writes_every_table(real, tmp_path):
    main([str(real("azure").parent), str(tmp_path)])
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(SOURCES)
