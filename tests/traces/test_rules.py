"""Rules of every loader: order, windows, limits, rates, and an account that adds up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces
from perfmodel.errors import InputError
from traces import LoadOptions

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def rows_file(write, rows):
    return write(HEADER + "".join(f"{t},{i},{o}\n" for t, i, o in rows))


def test_sorted_stably_and_inversions_counted(write):
    rows = [(5, 1, 1), (3, 2, 2), (3, 3, 3), (4, 4, 4), (1, 5, 5)]
    trace = traces.load("vidur", rows_file(write, rows))
    assert trace.arrival_s.tolist() == [0, 2, 2, 3, 4]
    assert trace.input_tokens.tolist() == [5, 2, 3, 4, 1], "ties keep the order of the file"
    assert trace.source_row.tolist() == [5, 2, 3, 4, 1]
    assert trace.account.inversions == 2


def test_empty_requests_are_dropped_by_reason_or_kept_flagged(write):
    path = rows_file(write, [(0, 0, 5), (1, 5, 0), (2, 0, 0), (3, 5, 5)])
    trace = traces.load("vidur", path)
    assert trace.account.dropped == {"zero_input": 2, "zero_output": 1}
    assert trace.account.line() == "4 rows read = 1 kept + 3 dropped (zero_input 2, zero_output 1)"
    kept = traces.load("vidur", path, LoadOptions(keep_failed=True))
    assert kept.input_tokens.tolist() == [1, 5, 1, 5]
    assert kept.output_tokens.tolist() == [5, 1, 1, 5]
    assert kept.flags.tolist() == ["failed", "failed", "failed", ""]
    assert kept.account.changed == {"zero_length_kept_as_1_token": 3}


def test_window_is_half_open_counted_from_the_earliest_time_and_rebased(write):
    path = rows_file(write, [(100, 0, 1), (110, 1, 1), (120, 2, 2), (129.5, 3, 3), (130, 4, 4)])
    trace = traces.load("vidur", path, LoadOptions(window_s=(20, 30)))
    assert trace.input_tokens.tolist() == [2, 3]
    assert trace.arrival_s.tolist() == [0.0, 9.5]
    assert trace.account.dropped == {"outside_window": 2, "zero_input": 1}


def test_window_with_an_open_end(write):
    path = rows_file(write, [(0, 1, 1), (10, 2, 2), (20, 3, 3)])
    trace = traces.load("vidur", path, LoadOptions(window_s=(10, float("inf"))))
    assert trace.input_tokens.tolist() == [2, 3]


@pytest.mark.parametrize("mode", ["drop", "clip_input"])
def test_over_long_requests_are_never_changed_silently(write, mode):
    path = rows_file(write, [(0, 50, 50), (1, 90, 20), (2, 10, 100), (3, 5, 120)])
    trace = traces.load("vidur", path, LoadOptions(max_context_tokens=100, over_long=mode))
    assert int(trace.context_tokens.max()) <= 100
    if mode == "drop":
        assert trace.account.dropped == {"over_long": 3}
    else:
        assert trace.input_tokens.tolist() == [50, 80]
        assert trace.flags.tolist() == ["", "clipped"]
        assert trace.account.changed == {"input_clipped": 1}
        assert trace.account.dropped == {"output_over_limit": 2}


def test_over_long_is_an_error_by_default_and_names_the_row(write):
    path = rows_file(write, [(0, 50, 50), (1, 90, 20), (2, 95, 30)])
    with pytest.raises(InputError, match=r"row 2: 90 \+ 20 tokens are more than max_context_tokens 100 \(2 such rows"):
        traces.load("vidur", path, LoadOptions(max_context_tokens=100))


def test_over_long_outside_the_window_does_not_matter(write):
    path = rows_file(write, [(0, 5, 5), (50, 900, 20)])
    trace = traces.load("vidur", path, LoadOptions(window_s=(0, 10), max_context_tokens=100))
    assert len(trace) == 1


def test_rate_scales_gaps_only(write):
    path = rows_file(write, [(7, 1, 2), (8, 3, 4), (12, 5, 6), (17, 7, 8)])
    recorded = traces.load("vidur", path)
    slow, fast = (traces.load("vidur", path, LoadOptions(rate_rps=rate)) for rate in (1.0, 4.0))
    assert recorded.mean_rate_rps == pytest.approx(0.3)
    assert fast.mean_rate_rps == pytest.approx(4.0)
    assert np.array_equal(slow.arrival_s / 4.0, fast.arrival_s), "t(rate r) = t(1)/r to the last bit"
    np.testing.assert_allclose(fast.arrival_s / fast.duration_s, recorded.arrival_s / recorded.duration_s, rtol=1e-12)
    assert fast.input_tokens.tolist() == recorded.input_tokens.tolist()


def test_rate_needs_gaps(write):
    path = rows_file(write, [(7, 1, 2), (7, 3, 4)])
    with pytest.raises(InputError, match="all arrivals are at one instant"):
        traces.load("vidur", path, LoadOptions(rate_rps=1.0))


def test_first_requests_by_arrival_not_by_row(write):
    path = rows_file(write, [(5, 1, 1), (0, 2, 2), (3, 3, 3)])
    trace = traces.load("vidur", path, LoadOptions(num_requests=2))
    assert trace.input_tokens.tolist() == [2, 3]
    assert trace.account.dropped == {"beyond_num_requests": 1}


def test_nothing_left_says_where_it_went(write):
    path = rows_file(write, [(0, 0, 5), (1, 5, 0)])
    with pytest.raises(InputError, match=r"no request left; 2 rows read = 0 kept \+ 2 dropped"):
        traces.load("vidur", path)


def grid_file(write, offset_ms=0):
    times = [3000 * (k // 10) + offset_ms * k for k in range(200)]
    return write(
        "".join(f'{{"timestamp": {t}, "input_length": 9, "output_length": 9, "hash_ids": [1]}}\n' for t in times)
    )


def test_jitter_spreads_arrivals_within_their_tick_and_says_so(write):
    path = grid_file(write)
    as_is = traces.load("mooncake", path)
    jittered = traces.load("mooncake", path, LoadOptions(jitter=True, seed=1))
    assert "arrivals lie on a 3 s grid: as is" in as_is.account.notes
    assert "arrivals lie on a 3 s grid: jittered within it, seed 1" in jittered.account.notes
    within_s = jittered.arrival_s - 3.0 * (
        (jittered.source_row - 1) // 10
    )  # up to the common shift that makes the first 0
    assert 2.5 < np.ptp(within_s) < 3.0
    assert len(np.unique(jittered.arrival_s)) == 200
    again = traces.load("mooncake", path, LoadOptions(jitter=True, seed=1))
    other = traces.load("mooncake", path, LoadOptions(jitter=True, seed=2))
    assert np.array_equal(jittered.arrival_s, again.arrival_s)
    assert not np.array_equal(jittered.arrival_s, other.arrival_s)


def test_jitter_is_refused_where_the_clock_is_fine(write):
    with pytest.raises(InputError, match="jitter is for a coarse clock"):
        traces.load("mooncake", grid_file(write, offset_ms=17), LoadOptions(jitter=True))


def test_manifest_records_hash_options_seed_and_account(write):
    path = rows_file(write, [(0, 1, 1), (1, 0, 1)])
    manifest = traces.load("vidur", path, LoadOptions(seed=9)).manifest()
    assert manifest["format"] == "vidur"
    assert manifest["file"] == path.name
    assert len(manifest["sha256"]) == 64
    assert manifest["options"]["seed"] == 9
    assert manifest["account"]["rows_read"] == 2
    assert manifest["account"]["dropped"] == {"zero_input": 1}


rows = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 60), st.integers(0, 60)),
    min_size=1,
    max_size=60,
)
options = st.builds(
    LoadOptions,
    window_s=st.none() | st.tuples(st.integers(0, 10), st.integers(11, 50)),
    num_requests=st.none() | st.integers(1, 30),
    rate_rps=st.none() | st.floats(0.1, 10),
    max_context_tokens=st.none() | st.integers(2, 100),
    over_long=st.sampled_from(["drop", "clip_input"]),
    keep_failed=st.booleans(),
)


@settings(deadline=None)
@given(rows=rows, options=options, block_bytes=st.sampled_from([64, 1 << 20]))
def test_the_account_adds_up_and_does_not_depend_on_blocks(tmp_path_factory, rows, options, block_bytes):
    from traces import files

    path = tmp_path_factory.mktemp("rows") / "trace.csv"
    path.write_text(HEADER + "".join(f"{t},{i},{o}\n" for t, i, o in rows))
    found = []
    for size in (block_bytes, 1 << 22):
        files.BLOCK_BYTES, kept = size, files.BLOCK_BYTES
        try:
            trace = traces.load("vidur", path, options)
            found.append(
                (trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.ids.tolist(), trace.account.as_dict())
            )
        except InputError as error:
            found.append(str(error))
        finally:
            files.BLOCK_BYTES = kept
    assert found[0] == found[1]
    if not isinstance(found[0], str):
        account = found[0][3]
        assert account["rows_read"] == len(rows) == account["kept"] + sum(account["dropped"].values())
