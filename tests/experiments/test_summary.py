"""What a sweep says on the terminal, from hand-made manifests."""

import io

import pytest
from rich.console import Console

from experiments.points import half_width, kind_of, paired_difference, points_of
from experiments.summary import closing_lines, number, table_of
from perfmodel.metrics import METRICS


def manifest(axes, replicate=0, goodput=1.0, status="done", **metrics):
    numbers = dict.fromkeys(METRICS, 0.0) | {"goodput_rps": goodput, "slo_attainment_frac": 0.9} | metrics
    parts = {
        name: numbers.pop(name, 0.0) for name in ("queue_s", "prefill_s", "decode_s", "remote_wait_s", "preempted_s")
    }
    return {
        "status": status,
        "axes": axes,
        "replicate": replicate,
        "seed": replicate,
        "config": {"system": axes.get("system", "vllm-multi")},
        "provenance": {"truth": {"pack": "analytic"}},
        "basis_s": {"analytic": 3.0, "measured": 1.0, "extrapolated": 0.001},
        "metrics": numbers,
        "breakdown": parts,
    }


def duel(**changes):
    rows = [("vllm-multi", 4, 3.9), ("vllm-multi", 8, 7.5), ("vllm-single", 4, 3.0), ("vllm-single", 8, 2.0)]
    return [
        manifest({"system": system, "workload.rate_rps": rate}, goodput=goodput, **changes.get(system, {}))
        for system, rate, goodput in rows
    ]


def printed(table) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_best_is_by_goodput_and_the_next_best_stands_at_its_own_best_load():
    best, why, trust = closing_lines(duel())
    assert best == (
        "Best by goodput: vllm-multi at rate_rps 8: 7.50 req/s (90 % of requests within the SLO); "
        "next vllm-single at rate_rps 4: 3 req/s."
    )
    assert why == "Why: against vllm-single at rate_rps 8, nothing differs by more than 5 %."
    assert trust.startswith(
        "Trust: simulated time is 25 % measured, 0 % interpolated, < 1 % extrapolated, 75 % analytic"
    )
    assert "one seed, so small differences may be chance" in trust


def test_why_names_the_largest_differences_first_and_only_those():
    multi = {"batch_mean": 20.0, "kv_util_frac": 0.50, "queue_s": 0.1, "tpot_s_p50": 0.030}
    single = {"batch_mean": 10.0, "kv_util_frac": 0.51, "queue_s": 9.0, "tpot_s_p50": 0.040, "num_rejected": 7}
    _, why, _ = closing_lines(duel(**{"vllm-multi": multi, "vllm-single": single}))
    assert why == (
        "Why: against vllm-single at rate_rps 8: rejected 0 against 7; queueing 0.100 against 9 s a request; "
        "mean batch 20 against 10 rows an instance; median TPOT 30 against 40 ms."
    )


def test_one_contender_is_explained_by_the_parts_of_its_latency():
    best, why, _ = closing_lines([manifest({}, goodput=2.0, queue_s=1.0, decode_s=3.0, kv_util_frac=0.4)])
    assert best == "Best by goodput: vllm-multi: 2 req/s (90 % of requests within the SLO)."
    assert why.startswith("Why: a mean request takes queue 1 s, decode 3 s; KV in use 40 %")


def test_several_scenarios_are_counted():
    def rows(output, multi, single):
        values = {"vllm-multi": multi, "vllm-single": single}
        return [manifest({"system": s, "workload.output": output}, goodput=g) for s, g in values.items()]

    best, _, _ = closing_lines(rows("chat", 3.0, 2.0) + rows("balanced", 1.0, 2.5))
    assert best == (
        "Best by goodput: vllm-multi in 1 of 2, vllm-single in 1 of 2; largest lead × 2.50 at output balanced "
        "(vllm-single before vllm-multi)."
    )


def test_replicates_give_a_paired_interval():
    """Each system alone varies a lot; the paired difference does not."""
    runs = [manifest({"system": "vllm-multi"}, r, goodput=g) for r, g in enumerate((5.0, 7.0, 9.0))]
    runs += [manifest({"system": "vllm-single"}, r, goodput=g) for r, g in enumerate((4.0, 6.1, 7.9))]
    a, b = points_of(runs)
    mean, width = paired_difference(a, b, "goodput_rps")
    assert mean == pytest.approx(1.0) and width < 0.3 < a.half_width("goodput_rps")
    best, _, trust = closing_lines(runs)
    assert "(difference 1 ± 0.248, 95 %)" in best
    assert "3 seeds a point" in trust
    text = printed(table_of(runs, 200))
    assert "goodput less" in text and "-1 ±0.248" in text


def test_half_width_is_students():
    assert half_width([1.0, 2.0, 3.0, 4.0]) == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-6)
    assert half_width([1.0]) != half_width([1.0])


def test_failed_runs_are_left_out_and_all_failed_says_so():
    rows = duel()
    rows[1]["status"] = "failed"
    assert "vllm-multi at rate_rps 4: 3.90" in closing_lines(rows)[0]
    assert "every run failed" in closing_lines([manifest({}, status="failed")])[0]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_its_main_columns_and_its_width(width):
    table = table_of(duel(), width)
    assert Console(width=200).measure(table).maximum <= width
    text = printed(table)
    for header in ("system", "rate_rps", "tok/s", "goodput", "rejected"):
        assert header in text
    assert ("served" in text) == (width == 120)
    assert "moves" not in text


def test_moves_are_shown_where_there_are_some():
    table = table_of([manifest({}, num_moves=3)], 200)
    assert "moves" in [str(column.header) for column in table.columns]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0123, "0.0123"),
        (1.0, "1"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (99.97, "100"),
        (123.4, "123"),
        (34432.0, "34,432"),
        (float("nan"), "–"),
    ],
)
def test_numbers_have_three_significant_digits(value, text):
    assert number(value) == text


def test_a_number_or_a_boolean_says_of_what():
    rows = [{"belief.scale.host": scale, "engine.splits_all_heads": True, "workload.rate_rps": 1} for scale in (0.5, 2)]
    half, double = points_of([manifest(row) for row in rows])
    assert half.contender == "host 0.5, splits_all_heads true"
    assert double.contender == "host 2, splits_all_heads true"
    text = printed(table_of([manifest(row) for row in rows], 200))
    assert "true" in text and "True" not in text


@pytest.mark.parametrize(
    ("axis", "kind"),
    [
        ("workload.rate_rps", "load"),
        ("workload.output", "scenario"),
        ("slo.tpot_s", "scenario"),
        ("system", "contender"),
        ("instance.tensor_parallel", "contender"),
    ],
)
def test_axes_are_loads_scenarios_or_choices(axis, kind):
    assert kind_of(axis) == kind
