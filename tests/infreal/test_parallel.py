"""Work cut over CPU threads: results, errors, and what it must leave as it was."""

import threading

import pytest
import torch
from attention_reference import close, make_case, reference_output

from infreal.kernels import micro_attention, torch_backend
from infreal.kernels.parallel import run_all


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_tasks_run_on_threads_of_one_torch_thread_each(two_threads):
    seen = {}

    def task(i):
        seen[i] = (threading.current_thread().name, torch.get_num_threads())

    run_all([lambda i=i: task(i) for i in range(8)])
    assert len(seen) == 8
    assert {threads for _, threads in seen.values()} == {1}
    assert all(name.startswith("kernels") for name, _ in seen.values())
    assert torch.get_num_threads() == 2, "the caller keeps its threads"
    fresh = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [2], "and so does a thread that starts later"


def test_an_error_of_a_task_is_raised(two_threads):
    def fail():
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        run_all([fail, lambda: None])


def test_one_thread_or_one_task_runs_at_home():
    names = []
    run_all([lambda: names.append(threading.current_thread().name)])
    assert names == [threading.current_thread().name]


@pytest.mark.parametrize("inference", [True, False])
def test_a_long_row_is_cut_over_the_threads(two_threads, monkeypatch, inference):
    """With small constants; also under inference mode, which belongs to a thread."""
    monkeypatch.setattr(torch_backend, "SEGMENT_TOKENS", 32)
    monkeypatch.setattr(torch_backend, "MIN_PART_BYTES", 1)
    case = make_case([200, 0, 31, 97])
    with torch.inference_mode(inference):
        out = micro_attention(
            case.q, case.kv_pool, case.block_table, case.num_tokens, layer=1, scale=case.scale, backend="torch"
        ).output()
    assert out.is_inference() == inference
    for row in range(4):
        expected = reference_output(case.q[row], case.keys[row], case.values[row], case.scale)
        assert close(out[row], expected)


def test_the_result_does_not_depend_on_the_number_of_rows(two_threads, monkeypatch):
    monkeypatch.setattr(torch_backend, "SEGMENT_TOKENS", 32)
    monkeypatch.setattr(torch_backend, "MIN_PART_BYTES", 1)
    case = make_case([200, 97])
    args = {"layer": 1, "scale": case.scale, "backend": "torch"}
    both = micro_attention(case.q, case.kv_pool, case.block_table, case.num_tokens, **args)
    one = micro_attention(case.q[1:], case.kv_pool, case.block_table[1:], case.num_tokens[1:], **args)
    assert torch.equal(one.acc[0], both.acc[1]) and torch.equal(one.e[0], both.e[1])
