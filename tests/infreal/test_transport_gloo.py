"""The transport over gloo where it differs from the one in a process: other processes, connections, threads, restarts."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, PrefixStore
from transport_tools import GlooNetwork

from infreal.transport import DeadlineExceeded, PairReset, PeerLost, TransportError
from infreal.transport.connecting import serve_store
from infreal.transport.gloo import GlooTransport
from infreal.transport.in_process import run_ranks

pytestmark = pytest.mark.timeout(90)
QUERY, ANSWER, BULK = 0, 1, 2
ECHO = """
import sys, time, torch
from datetime import timedelta
from infreal.transport import PeerLost, TransportError
from infreal.transport.connecting import serve_store
from infreal.transport.gloo import GlooTransport
torch.set_num_threads(1)
store = torch.distributed.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=30))
transport = GlooTransport(1, 2, store)
if sys.argv[2] == "again":
    transport.reset(0)
while True:
    try:
        x = torch.empty(2048)
        transport.wait(transport.post_recv(0, 0, x), time.monotonic() + 60)
        transport.send(0, 1, x + 1)
    except PeerLost:
        break
    except TransportError:
        transport.reset(0)
"""


def deadline(after_s=30.0):
    return time.monotonic() + after_s


@pytest.fixture
def pair():
    store = HashStore()
    ends = [GlooTransport(rank, 2, store) for rank in range(2)]
    yield ends
    for end in ends:
        end.close()


def received(end, tag, size=4, dtype=torch.float32, after_s=30.0):
    buffer = torch.empty(size, dtype=dtype)
    end.wait(end.post_recv(1 - end.rank, tag, buffer), deadline(after_s))
    return buffer


def exchange(end, value):
    """With an echo that adds one."""
    handle = end.post_recv(1, ANSWER, torch.empty(2048))
    end.send(1, QUERY, torch.full((2048,), float(value)))
    end.wait(handle, deadline())
    return handle.buffer.unique().tolist()


def start_echo(port, *args):
    root = Path(__file__).parents[2]
    return subprocess.Popen([sys.executable, "-c", ECHO, str(port), *args], env=os.environ | {"PYTHONPATH": str(root)})


def test_a_process_that_stalls_dies_and_comes_back():
    store = serve_store("127.0.0.1", timedelta(seconds=30))
    end, echo = GlooTransport(0, 2, store), start_echo(store.port, "first")
    try:
        assert exchange(end, 1) == [2]
        echo.send_signal(signal.SIGSTOP)
        handle = end.post_recv(1, ANSWER, torch.empty(2048))
        end.send(1, QUERY, torch.full((2048,), 7.0))
        with pytest.raises(DeadlineExceeded):
            end.wait(handle, deadline(0.2))
        echo.send_signal(signal.SIGCONT)
        end.reset(1)
        assert exchange(end, 3) == [4], "and no answer to the 7"

        handle = end.post_recv(1, BULK, torch.empty(5))
        echo.kill()
        echo.wait()
        with pytest.raises(PeerLost):
            end.wait(handle, deadline())
        with pytest.raises(PeerLost):
            end.send(1, QUERY, torch.empty(2048))
        echo = start_echo(store.port, "again")
        end.reset(1)
        assert exchange(end, 5) == [6]
        end.close()
        assert echo.wait(20) == 0, "it saw that the peer has gone"
    finally:
        echo.kill()
        end.close()


def test_the_store_listens_on_its_own_address_alone():
    store = serve_store("127.0.0.1")
    socket.create_connection(("127.0.0.1", store.port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), 5)


def test_who_does_not_know_the_secret_meets_nobody():
    store = serve_store("127.0.0.1")
    ends = [GlooTransport(rank, 2, PrefixStore(secret, store), "127.0.0.1") for rank, secret in enumerate("ab")]
    ends[0].send(1, QUERY, torch.ones(4))
    with pytest.raises(DeadlineExceeded):
        received(ends[1], QUERY, after_s=0.3)
    for end in ends:
        end.close()


def test_all_pairs_and_lanes_connect_at_once():
    """A connection to the store that one lane waits on is no obstacle to another (it was: each waited for the other side's)."""
    network = GlooNetwork(4)

    def talk(end):
        peers = [rank for rank in range(4) if rank != end.rank]
        for generation in range(8):
            for peer in peers:
                end.send(peer, QUERY, torch.full((4,), float(generation)))
                end.send(peer, BULK, torch.full((4,), float(generation)))
            handles = [end.post_recv(peer, tag, torch.empty(4)) for peer in peers for tag in (QUERY, BULK)]
            for handle in handles:
                end.wait(handle, deadline(5))
            assert {handle.buffer[0].item() for handle in handles} == {generation}
            barrier.wait(20)  # all have read before anybody resets
            for peer in peers:
                end.reset(peer) if end.rank < peer else None
            barrier.wait(20)
            for peer in peers:
                end.reset(peer) if end.rank > peer else None

    barrier = threading.Barrier(4)
    run_ranks(network, talk)
    for end in network.endpoints:
        end.close()


def counts():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_close_leaves_no_thread_and_no_socket():
    def use():
        store = HashStore()
        a, b = (GlooTransport(rank, 2, store) for rank in range(2))
        for tag in (QUERY, BULK):
            a.send(1, tag, torch.ones(4))
            received(b, tag)
            b.send(0, tag, torch.ones(1 << 20))  # nobody reads it
        a.reset(1)
        a.send(1, QUERY, torch.ones(4))  # nobody is there
        a.close()
        b.close()

    use()
    before = counts()
    for _ in range(3):
        use()
    until_s = deadline(5)
    while counts() > before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert counts() <= before


def test_bulk_that_nobody_reads_delays_no_query(pair):
    a, b = pair
    a.send(1, BULK, torch.zeros(16 << 20))
    a.send(1, BULK + 4, torch.full((4,), 2.0))
    for value in range(20):
        a.send(1, QUERY, torch.full((4,), float(value)))
        assert received(b, QUERY).tolist() == [value] * 4
    assert received(b, BULK + 4).tolist() == [2] * 4, "nor another tag of its lane"
    assert received(b, BULK, size=16 << 20).count_nonzero() == 0


def test_threads_share_an_endpoint(pair):
    errors = []

    def run(end, number):
        try:
            for i in range(100):
                size = 3 + (i + number) % 2 * 5000
                end.send(1 - end.rank, number, torch.full((size,), float(1000 * number + i)))
                assert received(end, number, size).eq(1000 * number + i).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(end, number)) for end in pair for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert pair[0].traffic == pair[1].traffic.__class__(
        {1: pair[1].traffic.received_bytes[0]}, {1: pair[1].traffic.sent_bytes[0]}, {1: 600}
    )


def test_a_time_out_on_one_side_breaks_the_pair_of_a_peer_that_lives(pair):
    a, b = pair
    a.send(1, QUERY, torch.ones(4))
    received(b, QUERY)
    handle = b.post_recv(0, 4, torch.empty(4))
    with pytest.raises(DeadlineExceeded):
        received(a, 8, after_s=0.05)
    with pytest.raises(PairReset):
        b.wait(handle, deadline())
    with pytest.raises(PairReset):
        b.send(0, QUERY, torch.ones(4))


def test_a_message_of_another_size_breaks_the_pair_wherever_it_comes(pair):
    a, b = pair
    for end in (a, b):
        end.send(1 - end.rank, QUERY, torch.ones(4))
    received(b, QUERY)
    a.send(1, QUERY, torch.ones(8))
    with pytest.raises(TransportError):
        received(b, QUERY, after_s=0.2)
    with pytest.raises(PairReset):
        received(a, ANSWER)


def test_a_restarted_rank_wants_a_reset_and_gets_nothing_of_its_former_self():
    store = HashStore()
    a, b = (GlooTransport(rank, 2, store) for rank in range(2))
    a.send(1, QUERY, torch.ones(4))
    received(b, QUERY)
    a.send(1, QUERY, torch.full((4,), 2.0))
    b.close()
    b = GlooTransport(1, 2, store)
    with pytest.raises(PairReset):
        b.send(0, QUERY, torch.ones(4))
    b.reset(0)
    a.reset(1)
    a.send(1, QUERY, torch.full((4,), 3.0))
    assert received(b, QUERY).tolist() == [3] * 4
    a.close()
    b.close()


def test_resets_at_any_moment_deliver_nothing_of_before(pair):
    """Both sides talk in threads; one of them resets now and then. A value is that of the sender's generation."""
    a, b = pair
    ended = threading.Event()

    def answer():
        while not ended.is_set():
            try:
                received(b, QUERY)
                b.send(0, ANSWER, torch.full((4,), float(b._pairs[0].meeting.joined)))
            except TransportError:
                if not ended.is_set():
                    b.reset(0)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        for number in range(60):
            handle = a.post_recv(1, ANSWER, torch.empty(4))
            a.send(1, QUERY, torch.ones(4))
            if number % 3:
                a.wait(handle, deadline())
                assert handle.buffer.tolist() == [float(a._pairs[1].meeting.joined)] * 4
            else:
                time.sleep(0.002 * (number % 4))
                a.reset(1)
    finally:
        ended.set()
        a.close()
        thread.join()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_any_dtype_and_size(pair, dtype, size):
    a, b = pair
    message = torch.randint(0, 2, (size,)).to(dtype)
    with torch.inference_mode():
        a.send(1, BULK, message.clone())
        assert received(b, BULK, size, dtype).equal(message)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        GlooTransport(2, 2, HashStore())
    a = GlooTransport(0, 2, HashStore())
    with pytest.raises(ValueError, match="complex64"):
        a.send(1, 0, torch.ones(1, dtype=torch.complex64))
    a.close()
    with pytest.raises(PeerLost, match="closed"):
        a.send(1, 0, torch.ones(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_go_through_pinned_memory(pair):
    a, b = pair
    for number in range(50):
        message = torch.full((1 << 18,), float(number), device="cuda")
        a.send(1, QUERY, message)
        message.fill_(-1)
        buffer = torch.empty(1 << 18, device="cuda")
        b.wait(b.post_recv(0, QUERY, buffer), deadline())
        assert buffer.eq(number).all()
