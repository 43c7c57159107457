"""Metrics against hand-computed runs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.metrics import METRICS, Capacity, Slo, as_arrays, breakdown, shares, summarise, within_slo
from perfmodel.records import INSTANCE_COLUMNS, MOVE_COLUMNS, REQUEST_COLUMNS, Counters, RunResult

SLO = Slo(ttft_s=1.0, ttft_s_per_1k_tokens=1.0, tpot_s=0.1)
CAPACITY = Capacity(
    num_instances=2,
    num_blocks=200,
    block_tokens=16,
    peak_flops_per_s=1000.0,
    flops_per_token=2,
    flops_per_pair=1,
    flops_per_output_token=3,
)


def request(req_id, arrival_s, ttft_s=0.5, tpot_s=0.05, output_tokens=11, **changes):
    first_s = arrival_s + ttft_s
    row = dict.fromkeys(REQUEST_COLUMNS, 0) | {
        "req_id": req_id,
        "arrival_s": arrival_s,
        "reason": None,
        "status": "finished",
    }
    times = {"first_token_s": first_s, "finish_s": first_s + tpot_s * (output_tokens - 1)}
    return row | {"input_tokens": 1000, "output_tokens": output_tokens} | times | changes


def result(requests, marks=None, window_kind="arrivals", **changes):
    end_s = max((row["finish_s"] for row in requests), default=0.0)
    fields = {
        "requests": {name: [row[name] for row in requests] for name in REQUEST_COLUMNS},
        "instances": {name: [] for name in INSTANCE_COLUMNS},
        "moves": {name: [] for name in MOVE_COLUMNS},
        "marks": {"start": Counters(), "end": Counters(t_s=end_s)} | (marks or {}),
        "window_kind": window_kind,
        "num_refused": 0,
        "basis_s": {},
        "makespan_s": end_s,
    }
    return RunResult(**(fields | changes))


def steady(num_requests=100, **changes):
    """One request a second; the window is [10, 99]."""
    rows = [request(i, float(i), **changes) for i in range(num_requests)]
    marks = {"window_start": Counters(t_s=10.0), "window_end": Counters(t_s=99.0)}
    return rows, marks


def test_columns_are_those_of_the_contract_in_order():
    rows, marks = steady()
    found = summarise(result(rows, marks), SLO, CAPACITY)
    assert [*found, "wall_s"] == list(METRICS)


def test_the_window_is_by_arrivals_and_requests_outside_do_not_count():
    rows, marks = steady()
    rows[5] = request(5, 5.0, ttft_s=1000.0)
    found = summarise(result(rows, marks), SLO, CAPACITY)
    assert found["window_kind"] == "arrivals"
    assert found["window_s"] == 89.0
    assert found["ttft_s_mean"] == pytest.approx(0.5)
    assert found["slo_attainment_frac"] == 1.0
    assert found["goodput_rps"] == pytest.approx(90 / 89)
    assert found["num_requests"] == 100


def test_quantiles_interpolate():
    rows, marks = steady()
    rows = [request(i, float(i), ttft_s=i / 100) for i in range(100)]
    found = summarise(result(rows, marks), SLO, CAPACITY)
    values = [i / 100 for i in range(10, 100)]
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert found[f"ttft_s_{name}"] == pytest.approx(np.quantile(values, q))


def test_finishes_window_keeps_unfinished_requests_as_misses():
    """Rejected at time 0 of a saturated run: outside the window in time, a miss all the same."""
    rows = [request(i, 0.0, ttft_s=i * 0.05, output_tokens=1) for i in range(40)]
    rows += [request(99, 0.0, status="rejected", first_token_s=None, finish_s=0.0)]
    marks = {"window_start": Counters(t_s=0.19), "window_end": Counters(t_s=1.79)}
    found = summarise(result(rows, marks, "finishes"), SLO, CAPACITY)
    inside = [row for row in rows if row["status"] == "finished" and 0.19 <= row["finish_s"] <= 1.79]
    assert 10 <= len(inside) < 40
    assert found["window_kind"] == "finishes"
    assert found["slo_attainment_frac"] == pytest.approx(len(inside) / (len(inside) + 1))
    assert found["request_per_s"] == pytest.approx(len(inside) / 1.6)


@pytest.mark.parametrize(
    ("num_requests", "window", "ttft_s"),
    [(9, (1.0, 8.0), 0.5), (100, (10.0, 99.0), 200.0), (100, None, 0.5)],
    ids=["fewer than ten", "shorter than the median latency", "a mark is missing"],
)
def test_the_whole_run_is_the_window_where_a_part_says_nothing(num_requests, window, ttft_s):
    rows = [request(i, float(i), ttft_s=ttft_s) for i in range(num_requests)]
    marks = {} if window is None else {"window_start": Counters(t_s=window[0]), "window_end": Counters(t_s=window[1])}
    found = summarise(result(rows, marks), SLO, CAPACITY)
    assert found["window_kind"] == "whole"
    assert found["window_s"] == found["makespan_s"]
    assert found["slo_attainment_frac"] == (1.0 if ttft_s < 1 else 0.0)


def test_rates_and_utilisations_come_from_the_counters_between_the_marks():
    rows, _ = steady()
    start = Counters(
        t_s=10.0, output_tokens=100, computed_tokens=1000, attention_pairs=10, kv_block_s=50.0, batch_s=20.0
    )
    end = Counters(
        t_s=99.0, output_tokens=990, computed_tokens=9900, attention_pairs=99, kv_block_s=940.0, batch_s=376.0
    )
    found = summarise(result(rows, {"window_start": start, "window_end": end}), SLO, CAPACITY)
    assert found["output_tok_per_s"] == pytest.approx(10.0)
    assert found["kv_util_frac"] == pytest.approx(890 / (200 * 89))
    assert found["compute_util_frac"] == pytest.approx((2 * 8900 + 89 + 3 * 890) / (1000 * 89))
    assert found["batch_mean"] == pytest.approx(356 / (2 * 89))


def test_slo_allows_more_time_for_longer_prompts_and_ignores_the_gap_of_one_token():
    rows = [
        request(0, 0.0, ttft_s=1.9),  # 1,000 tokens: allowed 2.0
        request(1, 0.0, ttft_s=2.1),
        request(2, 0.0, tpot_s=0.11),
        request(3, 0.0, output_tokens=1),
        request(4, 0.0, status="failed"),
        request(5, 0.0, status="rejected", first_token_s=None),
    ]
    good = within_slo(as_arrays(result(rows).requests), SLO)
    assert good.tolist() == [True, False, False, True, False, False]


def test_counts_cover_everything_and_served_tokens_only_what_finished():
    rows = [
        request(0, 0.0),
        request(1, 0.0, status="rejected", first_token_s=None, input_tokens=3000, output_tokens=11),
    ]
    rows[0]["num_preemptions"] = 2
    found = summarise(result(rows), SLO, CAPACITY)
    assert (found["num_requests"], found["num_finished"], found["num_rejected"]) == (2, 1, 1)
    assert found["num_preemptions"] == 2
    assert found["served_token_frac"] == pytest.approx(1011 / 4022)


def test_moves_count_only_when_committed():
    moves = {name: [0, 0] for name in MOVE_COLUMNS} | {"num_bytes": [5, 7], "committed_s": [None, 1.0]}
    samples = {name: [0] * 4 for name in INSTANCE_COLUMNS} | {
        "t_s": [0.0, 0.0, 1.0, 1.0],
        "borrowed_blocks": [1, 2, 3, 4],
    }
    found = summarise(result([request(0, 0.0)], moves=moves, instances=samples, num_refused=3), SLO, CAPACITY)
    assert (found["num_moves"], found["moved_bytes"], found["num_refused"]) == (1, 7, 3)
    assert found["remote_tokens_peak"] == 7 * 16
    alone = summarise(result([request(0, 0.0, remote_tokens_max=999)]), SLO, CAPACITY)
    assert alone["remote_tokens_peak"] == 999


def test_a_run_without_requests_is_all_undefined():
    found = summarise(result([]), SLO, CAPACITY)
    assert found["num_requests"] == 0
    assert math.isnan(found["goodput_rps"]) and math.isnan(found["ttft_s_p99"])


def test_breakdown_means_are_over_finished_requests():
    rows = [request(0, 0.0, queue_s=1.0), request(1, 0.0, queue_s=3.0), request(2, 0.0, queue_s=9.0, status="failed")]
    assert breakdown(result(rows).requests)["queue_s"] == 2.0
    assert breakdown(result([]).requests) == {}


def test_shares_sum_to_one():
    assert shares({"analytic": 3.0, "measured": 1.0}, ("measured", "analytic", "other")) == {
        "measured": 0.25,
        "analytic": 0.75,
        "other": 0.0,
    }
    assert shares({}, ("measured",)) == {"measured": 0.0}


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(0.01, 5), st.sampled_from(["finished", "rejected", "failed"])), min_size=1
    )
)
def test_goodput_never_exceeds_what_arrived(rows):
    rows.sort()
    requests = [request(i, a, ttft_s=t, status=status) for i, (a, t, status) in enumerate(rows)]
    found = summarise(result(requests), SLO, CAPACITY)
    assert 0 <= found["slo_attainment_frac"] <= 1
    assert found["goodput_rps"] * found["window_s"] <= len(requests) + 1e-9
    assert found["num_finished"] + found["num_rejected"] + found["num_failed"] == found["num_requests"]
