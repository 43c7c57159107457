"""The ranks of one instance: their collectives over gloo, and what they are told where one is late, gone, or never comes."""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from group_tools import joined, run_group
from torch.distributed import HashStore

from infreal.transport import TransportError
from infreal.transport.connecting import serve_store
from infreal.transport.group import ALONE, join_group

pytestmark = pytest.mark.timeout(90)
CHILD = """
import sys, time, torch
from infreal.transport.group import join_group
store = torch.distributed.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
group = join_group(store, 1, 2, 30.0, host="127.0.0.1")
group.all_reduce(torch.ones(4))
time.sleep(60)
"""


def test_alone_nothing_is_copied():
    x = torch.ones(3)
    assert ALONE.all_reduce(x) is x
    assert ALONE.all_gather(x).data_ptr() == x.data_ptr() and ALONE.all_gather(x).shape == (1, 3)
    assert join_group(HashStore(), 0, 1, 1.0) is ALONE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_in_place_and_what_each_rank_has(size, dtype):
    @torch.inference_mode()
    def work(group):
        x = torch.full((5, 7), float(group.rank + 1)).to(dtype)
        assert group.all_reduce(x) is x
        return x, group.all_gather(torch.full((2, 3), group.rank).to(dtype))

    for total, gathered in run_group(size, work):
        assert total.dtype == gathered.dtype == dtype
        assert total.eq(size * (size + 1) // 2).all()
        assert gathered.tolist() == [[[rank] * 3] * 2 for rank in range(size)]


def test_every_rank_has_the_same_bits():
    """Sums differ in their last bits where ranks add in an order of their own; tokens would then differ between ranks."""
    work = lambda group: group.all_reduce(torch.randn(6, 577, generator=torch.Generator().manual_seed(group.rank)))  # noqa: E731
    first, *others = run_group(4, work)
    assert first.std() > 1
    assert all(other.equal(first) for other in others)


@pytest.mark.parametrize("shape", [(), (0, 5)])
def test_single_numbers_and_nothing_at_all(shape):
    work = lambda group: (group.all_reduce(torch.ones(shape)), group.all_gather(torch.ones(shape)))  # noqa: E731
    for total, gathered in run_group(2, work):
        assert total.equal(torch.full(shape, 2.0)) and gathered.equal(torch.ones(2, *shape))


def test_a_rank_that_is_late_is_lost_and_so_is_the_group():
    groups = joined(3, timeout_s=0.2)
    errors = []

    def reduce(group):
        try:
            group.all_reduce(torch.ones(4))
        except TransportError as error:
            errors.append(str(error))

    for round_of_calls in (groups[:2], groups):
        errors.clear()
        threads = [threading.Thread(target=reduce, args=(group,)) for group in round_of_calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == len(round_of_calls)
    assert "of an instance's 3 has lost the others" in errors[0] and "\n" not in errors[0]


def test_a_rank_that_closes_wakes_those_that_wait():
    groups = joined(3, timeout_s=60)
    closing = threading.Timer(0.1, groups[1].close)
    closing.start()
    start_s = time.monotonic()
    with pytest.raises(TransportError):
        groups[0].all_gather(torch.ones(4))
    assert time.monotonic() - start_s < 30, "long before its own deadline"
    with pytest.raises(TransportError):
        groups[2].all_reduce(torch.ones(4))


def test_a_process_that_is_killed_is_missed_at_once():
    store = serve_store("127.0.0.1", timedelta(seconds=30))
    root = Path(__file__).parents[2]
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(store.port)], env=os.environ | {"PYTHONPATH": str(root)})
    try:
        group = join_group(store, 0, 2, 60.0, host="127.0.0.1")
        assert group.all_reduce(torch.ones(4)).tolist() == [2] * 4
        child.kill()
        with pytest.raises(TransportError):
            group.all_reduce(torch.ones(4))
    finally:
        child.kill()
        child.wait()


def test_who_never_comes_is_not_waited_for():
    with pytest.raises(TransportError, match=r"rank 0 of an instance's 2 has lost the others \(nobody waits"):
        join_group(HashStore(), 0, 2, 0.1)
