"""What every transport keeps, over each carrier: order, counters, deadlines, generations, loss."""

import threading
import time

import pytest
import torch

from infreal.transport import DeadlineExceeded, PairReset, PeerLost, TransportError
from infreal.transport.in_process import InProcessNetwork, run_ranks

SOON_S, LONG_S = 0.05, 20.0
pytestmark = pytest.mark.timeout(60)


def deadline(after_s: float = LONG_S) -> float:
    return time.monotonic() + after_s


def meet(a, b):
    """Both ends are connected once each has had a message of the other."""
    a.send(b.rank, 0, torch.ones(1))
    b.send(a.rank, 0, torch.ones(1))
    received(a, b.rank, 0, size=1)
    received(b, a.rank, 0, size=1)


def received(endpoint, peer, tag, size=2, dtype=torch.float32):
    buffer = torch.empty(size, dtype=dtype)
    endpoint.wait(endpoint.post_recv(peer, tag, buffer), deadline())
    return buffer.tolist()


@pytest.mark.parametrize("post_first", [True, False])
def test_a_message_arrives_whether_it_or_its_buffer_was_first(network, post_first):
    a, b = network().endpoints
    buffer = torch.empty(2, 3)
    handle = b.post_recv(0, 7, buffer) if post_first else None
    a.send(1, 7, torch.arange(6.0).view(2, 3))
    handle = handle or b.post_recv(0, 7, buffer)
    b.wait(handle, deadline())
    assert buffer.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_order_within_a_tag_and_none_between_tags(network):
    a, b = network().endpoints
    for value, tag in ((1.0, 0), (2.0, 0), (3.0, 1)):
        a.send(1, tag, torch.full((2,), value))
    assert received(b, 0, 1) == [3, 3]
    assert received(b, 0, 0) == [1, 1]
    assert received(b, 0, 0) == [2, 2]


def test_a_sent_buffer_is_free_at_once(network):
    a, b = network().endpoints
    message = torch.ones(2)
    a.send(1, 0, message)
    message.fill_(9)
    assert received(b, 0, 0) == [1, 1]


def test_traffic_counts_payload_by_peer(network):
    a, b, _ = network(3).endpoints
    a.send(1, 0, torch.zeros(5))
    a.send(1, 0, torch.zeros(3, dtype=torch.float16))
    a.send(2, 0, torch.zeros(1))
    received(b, 0, 0, size=5)
    assert a.traffic.sent_bytes == {1: 26, 2: 4}
    assert a.traffic.sent_messages == {1: 2, 2: 1}
    assert b.traffic.received_bytes == {0: 20}, "counted when it is waited for"


def test_a_silent_peer_ends_the_wait_at_the_deadline_and_breaks_the_pair(network):
    a, b = network().endpoints
    handle = a.post_recv(1, 4, torch.empty(1))
    start_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="rank 0, peer 1, tag 4"):
        a.wait(handle, deadline(SOON_S))
    assert SOON_S <= time.monotonic() - start_s < SOON_S + 2
    with pytest.raises(PairReset, match="wants a reset"):
        a.send(1, 0, torch.empty(1))
    with pytest.raises(PairReset):
        a.post_recv(1, 0, torch.empty(1))
    a.reset(1)
    b.reset(0)
    a.send(1, 0, torch.ones(2))
    assert received(b, 0, 0) == [1, 1]


def test_nothing_of_before_a_reset_is_delivered_after_it(network):
    a, b = network().endpoints
    a.send(1, 0, torch.full((2,), 1.0))
    old_buffer = torch.zeros(2)
    a.post_recv(1, 3, old_buffer)
    a.reset(1)
    a.send(1, 0, torch.full((2,), 2.0))
    with pytest.raises(PairReset):
        b.send(0, 3, torch.ones(2))  # b has not joined yet
    b.reset(0)
    assert received(b, 0, 0) == [2, 2]
    b.send(0, 3, torch.full((2,), 5.0))
    assert received(a, 1, 3) == [5, 5]
    assert old_buffer.tolist() == [0, 0]


@pytest.mark.parametrize("resets", ["ab", "ba", "aab", "bba", "abba", "abbba"])
def test_both_sides_meet_again_whatever_the_order_of_resets(network, resets):
    """Whoever resets once more than the other opens a further generation, which the other joins with its next reset."""
    a, b = network().endpoints
    for side in resets:
        if side == "a":
            a.reset(1)
        else:
            b.reset(0)
    a.send(1, 0, torch.ones(2))
    assert received(b, 0, 0) == [1, 1]


def test_a_reset_wakes_the_peer_that_waits(network):
    a, b = network().endpoints
    handle = b.post_recv(0, 0, torch.empty(1))
    threading.Timer(SOON_S, a.reset, args=(1,)).start()
    with pytest.raises(PairReset):
        b.wait(handle, deadline())


def test_a_killed_peer_ends_the_wait_before_the_deadline(network):
    ranks = network(3)
    a, b, c = ranks.endpoints
    meet(a, b)
    handle = a.post_recv(1, 0, torch.empty(1))
    threading.Timer(SOON_S, ranks.kill, args=(1,)).start()
    start_s = time.monotonic()
    with pytest.raises(PeerLost):
        a.wait(handle, deadline())
    assert time.monotonic() - start_s < LONG_S / 2
    with pytest.raises(PeerLost):
        a.send(1, 0, torch.empty(1))
    with pytest.raises(PeerLost):
        b.send(0, 0, torch.empty(1))
    c.send(0, 0, torch.ones(2))
    assert received(a, 2, 0) == [1, 1], "the others go on"


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(2, dtype=torch.float16)])
def test_a_message_that_does_not_fit_its_buffer_is_an_error(network, wrong):
    a, b = network().endpoints
    a.send(1, 0, wrong)
    with pytest.raises(TransportError, match="for a buffer of 2 ×"):
        received(b, 0, 0)


def test_buffers_are_dense_and_peers_exist(network):
    a, _ = network().endpoints
    with pytest.raises(ValueError, match="dense"):
        a.send(1, 0, torch.ones(4, 4).t())
    for peer in (0, 2, -1):
        with pytest.raises(ValueError, match="no peer"):
            a.send(peer, 0, torch.ones(1))


def test_run_ranks_returns_by_rank_and_raises_the_cause():
    def around(x):
        x.send((x.rank + 1) % 3, 0, torch.full((2,), float(x.rank)))
        return received(x, (x.rank - 1) % 3, 0)[0]

    assert run_ranks(InProcessNetwork(3), around) == [2, 0, 1]

    def fails(x):
        if x.rank == 1:
            raise KeyError("the cause")
        return received(x, 1, 0)

    with pytest.raises(KeyError, match="the cause"):
        run_ranks(InProcessNetwork(3), fails)
