"""Orders between the ranks of an instance: whole, in order, and nothing but orders."""

import io
import pickle
from decimal import Decimal

import pytest

from infreal.actors.channel import ROOM_BYTES, Channel, Items
from infreal.actors.orders import Drop, Iterate
from infreal.transport import TransportError


def test_orders_come_whole_and_in_order(network):
    leader, *followers = [Channel(endpoint) for endpoint in network(3).endpoints]
    orders = [Drop(1), Iterate([list(range(n)) for n in (0, 3, ROOM_BYTES)]), Drop(2), Iterate([]), Drop(3)]
    for order in orders:
        leader.send([1, 2], order)
    for follower in followers:
        assert [follower.receive(0, 10.0) for _ in orders] == orders
        follower.send([0], Drop(follower.rank))
    assert [leader.receive(rank, 10.0) for rank in (1, 2)] == [Drop(1), Drop(2)]


def test_what_is_no_order_is_not_made(network):
    """Whatever sends the bytes: unpickling makes the classes of orders, and calls nothing else."""
    leader, follower = [Channel(endpoint) for endpoint in network(2).endpoints]
    leader.send([1], Decimal(1))
    with pytest.raises(pickle.UnpicklingError, match=r"decimal\.Decimal is no part of an order"):
        follower.receive(0, 10.0)


@pytest.mark.parametrize("name", ["dataclass", "dataclass.__builtins__.get", "ReadRow", "Drop.__init__"])
def test_what_a_module_of_orders_imports_is_not_made(name):
    """Pickle reaches all of these by itself; from the second it can call anything."""
    data = naming("infreal.actors.orders", name)
    assert pickle.loads(data)
    with pytest.raises(pickle.UnpicklingError, match="is no part of an order"):
        Items(io.BytesIO(data)).load()
    assert Items(io.BytesIO(naming("infreal.actors.orders", "Drop"))).load() is Drop


def naming(module: str, name: str) -> bytes:
    """A pickle of what has this name."""
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + b"\x93."


def test_a_leader_that_is_gone(network):
    net = network(2)
    leader, follower = [Channel(endpoint) for endpoint in net.endpoints]
    leader.send([1], Drop(1))
    assert follower.receive(0, 10.0) == Drop(1)
    net.kill(0)
    with pytest.raises(TransportError):
        follower.receive(0, 10.0)
