"""StepTime against a plain loop over iterations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.steptime import StepTime

lines = st.lists(
    st.tuples(st.floats(1e-4, 0.1), st.sampled_from([0.0, 1e-6, 1e-5, 3e-4, 1e-2])), min_size=1, max_size=5
)


@given(lines=lines, offset_s=st.floats(0, 0.01), iterations=st.integers(1, 400))
def test_total_is_the_sum_of_single_iterations(lines, offset_s, iterations):
    step = StepTime(offset_s, lines)
    durations = [offset_s + max(a + b * j for a, b in lines) for j in range(iterations)]
    assert step.total_s(iterations) == pytest.approx(sum(durations), rel=1e-9)
    assert [step.duration_s(j) for j in range(iterations)] == pytest.approx(durations, rel=1e-12)


slopes = st.sampled_from([0.0, 1e-6, 1e-5, 3e-4])
bends = st.lists(
    st.tuples(st.floats(1e-4, 0.05), slopes, st.floats(0, 0.05), slopes, st.sampled_from([1e-6, 1e-4])).map(
        lambda b: ((b[0], b[1] + b[4]), (b[0] + b[2], b[1]))
    ),
    max_size=2,
)


@given(lines=lines, bends=bends, offset_s=st.floats(0, 0.01), iterations=st.integers(1, 400))
def test_of_a_bend_the_lower_line_counts(lines, bends, offset_s, iterations):
    step = StepTime(offset_s, lines, bends)
    highest = [
        max(*(a + b * j for a, b in lines), *(min(a + b * j for a, b in bend) for bend in bends), 0.0)
        for j in range(iterations)
    ]
    durations = [offset_s + time_s for time_s in highest]
    assert step.total_s(iterations) == pytest.approx(sum(durations), rel=1e-9)
    assert [step.duration_s(j) for j in range(iterations)] == pytest.approx(durations, rel=1e-9)
    done = step.completed(step.total_s(iterations), 1000)
    assert done == iterations


@given(lines=lines, offset_s=st.floats(0, 0.01), elapsed=st.floats(0, 3.0), limit=st.integers(1, 500))
def test_completed_is_the_last_boundary_passed(lines, offset_s, elapsed, limit):
    step = StepTime(offset_s, lines)
    done = step.completed(elapsed, limit)
    assert 0 <= done <= limit
    assert step.total_s(done) <= elapsed
    assert done == limit or step.total_s(done + 1) > elapsed


@given(lines=lines, iterations=st.integers(1, 300))
def test_a_boundary_is_complete_at_its_own_time(lines, iterations):
    step = StepTime(0.0, lines)
    assert step.completed(step.total_s(iterations), 1000) == iterations
