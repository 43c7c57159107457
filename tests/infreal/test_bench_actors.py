"""The benchmark of actors beside one process."""

import pytest

from infreal.bench.actors import measure_actors, report

pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(200)
def test_the_same_requests_in_one_process_and_on_actors():
    findings = list(measure_actors(3))
    assert [(f.where, f.num_instances) for f in findings] == [
        ("one process", 1),
        ("one process", 2),
        ("Ray actors", 1),
        ("Ray actors", 2),
    ]
    assert all(f.tokens_per_s > 0 and f.iteration_s > 0 for f in findings)
    assert [f.overhead_s is None for f in findings] == [False, True, False, False]
    assert len(report(findings).splitlines()) == 5
