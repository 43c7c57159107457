"""Faults of hosts in threads: whoever dies, and when: requests end as one instance would have it, and no block is lost."""

import time
from dataclasses import replace
from threading import Lock

import numpy as np
import pytest
from actor_tools import ActorRun
from pool_tools import QUICK, Restless, cluster, reference, workload

from infreal.actors import head
from infreal.actors.mail import OpenFetch, OpenRead, ReadOpened, ReceiverReady
from infreal.transport import DeadlineExceeded
from perfmodel.cluster import Workload
from perfmodel.errors import RunError
from perfmodel.messages import (
    DISPATCHER,
    GMANAGER,
    CreditorLedger,
    DebtorLedger,
    MessageReceived,
    MoveKvCache,
    RequestAborted,
    Store,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]
SOON = replace(QUICK, lease_s=1.2, renew_s=0.2, order_ttl_s=1.0)
LOAD = workload([(30, 90), (44, 90), (20, 90), (60, 60)], gap_s=0.02)


def restless(num_instances=3, num_blocks=160):
    return cluster(num_instances, num_blocks, placement=Restless, scheduler=SOON)


class AtItem:
    """Does something when the nth item of a kind is about to be posted: `act(run, sender, receiver)` with the two of the pair."""

    def __init__(self, run, kind, nth, act):
        self.run, self.kind, self.left, self.act, self.lock = run, kind, nth, act, Lock()
        run.fleet.watch = self

    def __call__(self, receiver, item):
        message = item.message if isinstance(item, MessageReceived) else item
        with self.lock:
            if not isinstance(message, self.kind):
                return
            self.left -= 1
            if self.left != 0:
                return
        self.act(self.run, *pair_of(receiver, item, message))

    @property
    def has_acted(self):
        return self.left <= 0


def pair_of(receiver, item, message):
    """(debtor, creditor) that an item is about."""
    match message:
        case OpenRead(reader) | OpenFetch(reader):
            return reader, receiver
        case ReadOpened(creditor) | ReceiverReady(creditor):
            return receiver, creditor
        case MoveKvCache():
            return receiver, message.parts[0][0]
        case CreditorLedger():
            return receiver, item.sender
    return item.sender, receiver


def kill_debtor(run, debtor, creditor):
    run.fleet.die(debtor)


def kill_creditor(run, debtor, creditor):
    run.fleet.die(creditor)


# what is said in a move and behind it, in order
POINTS = [MoveKvCache, DebtorLedger, CreditorLedger, Store, ReceiverReady, OpenRead, ReadOpened]
QUICK_POINTS = [Store, OpenRead]


def some_slow(values, quick):
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("act", some_slow([kill_debtor, kill_creditor], [kill_creditor]))
@pytest.mark.parametrize("kind", some_slow(POINTS, QUICK_POINTS), ids=lambda kind: kind.__name__)
def test_either_side_dies_at_any_point_of_a_move(kind, act):
    """S11: after the leases all blocks are free, and every request has the tokens of one instance."""
    run = ActorRun(restless(), LOAD)
    watch = AtItem(run, kind, 4, act)
    run.finish().assert_exact()
    assert watch.has_acted
    assert sum(member.deaths for member in run.head.members.values()) == 1


@pytest.mark.parametrize("kind", some_slow([Store, ReceiverReady, OpenRead], [Store]), ids=lambda kind: kind.__name__)
def test_clients_go_away_in_mid_move(kind):
    """S11: aborted at a point of a move; the others' tokens do not change."""
    run = ActorRun(restless(), LOAD)
    AtItem(run, kind, 3, lambda run, debtor, creditor: [run.fleet.post(DISPATCHER, RequestAborted(i)) for i in (0, 1)])
    run.finish()
    assert run.result.requests["status"] == ["aborted", "aborted", "finished", "finished"]
    for req_id in (2, 3):
        assert run.head.outputs[req_id] == reference(run.decoder, run.prompts(req_id), LOAD.output_tokens[req_id])[0]
    assert [machine.pool.free for machine in run.machines] == [160] * 3


@pytest.mark.parametrize("who", some_slow([0, 1, 2, GMANAGER], [0]))
def test_a_host_dies_in_mid_step(who):
    """S14, and the gManager, which starts again from heartbeats; the dead return under a new incarnation."""
    run = ActorRun(restless(), workload([(40, 120)] * 4))
    run.at(0.4, lambda run: run.fleet.die(who))
    run.finish().assert_exact()
    assert run.head.members[who].incarnation == 2


@pytest.mark.slow
def test_every_host_dies_once():
    run = ActorRun(restless(), workload([(30 + 7 * i, 120) for i in range(6)], gap_s=0.1))
    for i, who in enumerate((1, GMANAGER, 0, 2)):
        run.at(0.3 + 0.4 * i, lambda run, who=who: run.fleet.die(who))
    run.finish().assert_exact()
    assert [run.head.members[who].incarnation for who in (GMANAGER, 0, 1, 2)] == [2] * 4


def test_a_pair_whose_exchange_fails_is_made_again():
    """Both sides live: the pair is reset, and what was lent over it is recomputed."""
    run = ActorRun(cluster(2, 24, scheduler=SOON), workload([(120, 60), (30, 40)]))
    run.at(0.3, break_a_wait)
    run.finish().assert_exact()
    assert run.head.members[0].deaths == run.head.members[1].deaths == 0


def break_a_wait(run):
    """The next answer to the first instance does not come in time."""
    transport = run.fleet.hosts[0].pairs._transport
    wait = transport.wait

    def fail(handle, deadline_s):
        del transport.wait
        transport._broken.add(handle.peer)
        raise DeadlineExceeded(f"nothing came (peer {handle.peer}) by the deadline")

    assert wait.__func__ is type(transport).wait
    transport.wait = fail


def test_a_slow_link_only_takes_time():
    """Answers and blocks come late, within the deadline: nobody is lost."""
    run = ActorRun(cluster(2, 16, scheduler=SOON), workload([(88, 24)]))
    run.at(0.0, slow_down, 0.03)
    run.finish().assert_exact()
    assert run.result.requests["remote_tokens_max"][0] > 0
    assert all(member.deaths == 0 for member in run.head.members.values())


def slow_down(run, delay_s):
    for host in (run.fleet.hosts[0], run.fleet.hosts[1]):
        transport = host.pairs._transport
        wait = transport.wait

        def late(handle, deadline_s, wait=wait):
            time.sleep(delay_s)
            wait(handle, deadline_s)

        transport.wait = late


def test_a_run_ends_where_the_dead_do_not_return(monkeypatch):
    """As of a node that is gone: a prompt that needs two instances waits for the second in vain."""
    monkeypatch.setattr(head, "MISSING_S", 1.0)
    run = ActorRun(restless(), workload([(900, 200)]))
    run.at(0.5, lambda run: setattr(run.fleet, "make", lambda address: None))
    for who in (1, 2):
        run.at(0.5, lambda run, who=who: run.fleet.die(who))
    with pytest.raises(
        RunError, match=r"(?s)nothing has happened for 1 s; 1 requests.*instance-1 has died and finds no"
    ):
        run.finish()


def test_the_dispatcher_cannot_be_replaced():
    run = ActorRun(restless(), LOAD)
    run.at(0.2, lambda run: run.fleet.die(DISPATCHER))
    with pytest.raises(RunError, match="dispatcher has died"):
        run.finish()


def test_impatient_clients():
    load = workload([(60, 200), (20, 40), (90, 200), (30, 40)])
    load = Workload(load.arrival_s, load.input_tokens, load.output_tokens, patience_s=np.array([0.2, 9e9, 0.3, 9e9]))
    run = ActorRun(restless(2, 120), load).finish()
    assert run.result.requests["status"] == ["aborted", "finished", "aborted", "finished"]
    assert [machine.pool.free for machine in run.machines] == [120] * 2
