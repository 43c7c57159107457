"""The transport over NCCL with a fake in NCCL's place: which operations start on which communicator, and in which order."""

import threading
import time

import pytest
import torch
from transport_tools import NcclNetwork

from infreal.transport import DeadlineExceeded, PairReset
from infreal.transport.in_process import InProcessNetwork
from infreal.transport.nccl import ASIDE_BYTES, HEADER_TAGS, NcclTransport

pytestmark = pytest.mark.timeout(60)
QUERY, ANSWER, BULK = 0, 1, 2


def deadline(after_s=20.0):
    return time.monotonic() + after_s


@pytest.fixture
def network():
    made = NcclNetwork(2)
    yield made
    for end in made.endpoints:
        end.close()


def received(end, tag, size=4, after_s=20.0):
    buffer = torch.empty(size)
    end.wait(end.post_recv(1 - end.rank, tag, buffer), deadline(after_s))
    return buffer


def operations(network, name, kind):
    return [size for where, what, size in network.journal if (where, what) == (name, kind)]


def test_both_sides_start_operations_in_one_order_whatever_threads_do(network):
    """Messages of four tags go both ways, each of a size of its own; half of them come before their buffers."""

    def send(end, tag):
        for i in range(25):
            end.send(1 - end.rank, tag, torch.full((1000 * tag + i + 1,), float(i)))

    def receive(end, tag):
        for i in range(25):
            assert received(end, tag, 1000 * tag + i + 1).eq(i).all()

    errors = []

    def run(work, end, tag):
        try:
            work(end, tag)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(work, end, tag))
        for tag in range(4)
        for end in network.endpoints
        for work in (send, receive)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(network.wires) == 4, "one for each lane and direction"
    for name in network.wires:
        assert operations(network, name, "send") == operations(network, name, "recv")
        assert len(operations(network, name, "send")) == 50


def test_communicators_that_are_made_both_ways_do_not_wait_for_each_other(network):
    """To start the first operation is to wait for the other side, which does so too."""
    network.delays_s = (0.15, 0.05)  # receivers are waiting when senders come
    for end in network.endpoints:
        end.send(1 - end.rank, QUERY, torch.ones(4))
    for end in network.endpoints:
        assert received(end, QUERY, after_s=5.0).eq(1).all()


def test_a_posted_buffer_starts_nothing_before_its_header_comes(network):
    """A receive that waits for its sender would occupy the GPU."""
    a, b = network.endpoints
    waiting = b.post_recv(0, QUERY, torch.empty(7))
    a.send(1, ANSWER, torch.ones(4))
    received(b, ANSWER)
    assert [size for _, _, size in network.journal] == [4, 4]
    a.send(1, QUERY, torch.ones(7))
    b.wait(waiting, deadline())


def test_a_move_that_does_not_get_on_delays_no_query(network):
    a, b = network.endpoints
    a.send(1, BULK, torch.ones(4))
    received(b, BULK)
    next(iter(network.wires.values())).held = True
    a.send(1, BULK, torch.ones(8))
    moving = b.post_recv(0, BULK, torch.empty(8))
    for value in range(10):
        a.send(1, QUERY, torch.full((4,), float(value)))
        assert received(b, QUERY).eq(value).all()
    assert not moving.done


def test_a_broken_pair_gives_up_its_communicators_and_a_reset_makes_others(network):
    a, b = network.endpoints
    a.send(1, QUERY, torch.ones(4))
    received(b, QUERY)
    former = list(network.wires.values())
    with pytest.raises(DeadlineExceeded):
        received(b, QUERY, after_s=0.05)
    assert all(wire.aborted for wire in former)
    a.reset(1)
    b.reset(0)
    a.send(1, QUERY, torch.ones(4))
    received(b, QUERY)
    assert len(network.wires) == 2


@pytest.mark.parametrize("header", [[1, QUERY, ASIDE_BYTES, 0], [1, QUERY, -1, 0], [1, QUERY, 4, 99]])
def test_a_header_is_checked_before_a_buffer_is_made(network, header):
    b = network.endpoints[1]
    waiting = b.post_recv(0, ANSWER, torch.empty(4))
    network.below.endpoints[0].send(1, HEADER_TAGS[0], torch.tensor(header))
    with pytest.raises(PairReset):
        b.wait(waiting, deadline())
    with pytest.raises(PairReset):
        b.send(0, QUERY, torch.ones(4))
    assert network.journal == []


def test_an_error_of_a_communicator_breaks_the_pair():
    def make_group(name, side):
        raise RuntimeError("no NCCL")

    a, b = (NcclTransport(end, make_group, "cpu", lambda buffer: True) for end in InProcessNetwork(2).endpoints)
    handle = b.post_recv(0, QUERY, torch.empty(4))
    a.send(1, QUERY, torch.ones(4))
    with pytest.raises(PairReset):
        b.wait(handle, deadline())


def test_tensors_of_the_cpu_go_over_the_transport_below():
    def make_group(name, side):
        raise AssertionError("no communicator is made")

    a, b = (NcclTransport(end, make_group) for end in InProcessNetwork(2).endpoints)
    a.send(1, BULK, torch.ones(4))
    assert received(b, BULK).eq(1).all()
