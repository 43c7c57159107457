"""`python -m infreal.bench exchange`: it measures both carriers, and reports what it measured."""

import csv
import io

import pytest
import torch

from infreal.bench.exchange import measure_exchange, write_findings
from infreal.bench.partner import Partner


def fail(transport, store):
    raise ValueError("the cause")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_case_is_measured_on_both_carriers_and_written():
    threads = torch.get_num_threads()
    findings = list(measure_exchange(rounds=2, move_rounds=3))
    assert torch.get_num_threads() == threads, "as it was"
    assert all(finding.value > 0 for finding in findings)
    cases = {finding.case for finding in findings}
    for where in ("8 KB there and back/{}", "16 MB move/{}, alone", "16 MB move/{}, beside a model"):
        assert {where.format("gloo"), where.format("transport")} <= cases
    file = io.StringIO()
    write_findings(findings, file)
    rows = list(csv.DictReader(file.getvalue().splitlines()))
    assert [(row["case"], float(row["value"])) for row in rows] == [(f.case, f.value) for f in findings]


@pytest.mark.timeout(60)
def test_a_failure_in_the_partner_process_is_told_with_its_cause():
    with Partner() as partner:
        partner.start(fail)
        with pytest.raises(RuntimeError, match="the cause"):
            partner.result()
