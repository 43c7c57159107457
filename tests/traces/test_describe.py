"""Descriptions of the real files against workloads.md, "Measured on the files here"."""

import numpy as np
import pytest

import traces
from traces import LoadOptions
from traces.describe import burstiness, describe

# rows, req/s, then mean, SD, p50, p99, max of input and output, CV of gaps
MEASURED = {
    ("azure-2023", "azure/AzureLLMInferenceTrace_code.csv"): (
        (8819, 2.57),
        (2048, 1974, 1469, 7436, 7437),
        (28, 60, 13, 251, 1899),
        13.15,
    ),
    ("azure-2023", "azure/AzureLLMInferenceTrace_conv.csv"): (
        (19366, 5.53),
        (1155, 1109, 1020, 4142, 14050),
        (211, 163, 129, 601, 1000),
        1.09,
    ),
    ("mooncake", "mooncake/conversation_trace.jsonl"): (
        (12031, 3.40),
        (12035, 15801, 6909, 85400, 126195),
        (343, 250, 350, 1119, 2000),
        3.03,
    ),
    ("mooncake", "mooncake/synthetic_trace.jsonl"): (
        (3993, 3.91),
        (15325, 18382, 11587, 66456, 191378),
        (149, 178, 69, 768, 893),
        1.01,
    ),
}


@pytest.mark.parametrize("source", MEASURED, ids=lambda source: source[1])
def test_real_files_have_the_numbers_of_the_document(real, source):
    fmt, name = source
    (rows, rate_rps), inputs, outputs, gap_cv = MEASURED[source]
    found = describe(traces.load(fmt, real(name)))
    assert found["num_requests"] == rows
    assert found["rate_rps"] == pytest.approx(rate_rps, abs=0.005)
    for side, wanted in (("input_tokens", inputs), ("output_tokens", outputs)):
        numbers = [found[side][key] for key in ("mean", "sd", "p50", "p99", "max")]
        assert numbers == pytest.approx(wanted, rel=1e-3, abs=1.01), "the document interpolates p99"
    assert found["gap_cv"] == pytest.approx(gap_cv, abs=0.006)


def test_mooncake_conversation_jittered_is_nearly_poisson(real):
    found = describe(traces.load("mooncake", real("mooncake/conversation_trace.jsonl"), LoadOptions(jitter=True)))
    assert found["gap_cv"] == pytest.approx(1.01, abs=0.02)


def test_azure_code_has_empty_minutes_and_a_long_gap(real):
    found = describe(traces.load("azure-2023", real("azure/AzureLLMInferenceTrace_code.csv")))
    assert found["empty_minutes"] == 12
    assert found["longest_gap_s"] == pytest.approx(217, abs=0.5)
    assert found["same_instant_frac"] == 0.0, "all times are distinct"


def test_vidur_copies_of_the_azure_files_are_the_same_workload(real):
    for azure, vidur in (("Code", "code"), ("Conv", "conv")):
        one = traces.load("azure-2023", real(f"azure/AzureLLMInferenceTrace_{azure.lower()}.csv"))
        two = traces.load("vidur", real(f"vidur/splitwise_{vidur}.csv"))
        assert np.array_equal(one.input_tokens, two.input_tokens)
        assert np.array_equal(one.output_tokens, two.output_tokens)
        np.testing.assert_allclose(one.arrival_s, two.arrival_s, atol=1e-6)


def test_real_burstgpt_rows(real):
    first = traces.load("burstgpt", real("burstgpt/rows_seen_v1.csv"))
    third = traces.load("burstgpt", real("burstgpt/rows_seen_v3.csv"))
    assert (len(first), len(third)) == (7, 4)
    assert third.arrival_s.tolist() == [0.0, 51.0, 82.0, 144.0]
    assert third.session.tolist() == [0, 1, 2, 3]


def test_burstiness_by_hand():
    found = burstiness(np.array([0.0, 0.0, 10.0, 130.0, 190.0]))
    assert found["empty_minutes"] == 1, "full minutes hold 3, 0, 1"
    assert found["longest_gap_s"] == 120.0
    assert found["same_instant_frac"] == 0.25
    assert found["peak_60s_over_mean"] == pytest.approx(3 / (4 / 3))
    assert found["dispersion_60s"] == pytest.approx(np.var([3, 0, 1]) / (4 / 3))


def test_one_request_has_no_burstiness():
    found = burstiness(np.zeros(1))
    assert found["gap_cv"] is None
    assert found["longest_gap_s"] is None
