"""GManager: a view from heartbeats, one capacity order in flight, restarts, deaths, preemption of the youngest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.catalogue import load_link
from perfmodel.gmanager import DEAD_AFTER_HEARTBEATS, ClusterFacts, GManager, share_evenly
from perfmodel.loan import CLOCK_DRIFT
from perfmodel.messages import (
    Heartbeat,
    HeartbeatReply,
    MessageReceived,
    MoveKvCache,
    Need,
    OrderId,
    PeerLost,
    Preempt,
    RequestPlacementEntry,
    TimerFired,
)
from perfmodel.view import Load, Move, SchedulerParams

PARAMS = SchedulerParams()  # periods and heartbeats 1 s, orders 3 s, lease 10 s
TTL_S = PARAMS.order_ttl_s * (1 + 2 * CLOCK_DRIFT)


def link(a, b):
    """Nodes of three instances."""
    return load_link("nvlink3" if a // 3 == b // 3 else "ethernet-100g")


class Planned:
    """A placement policy that orders the moves it was given."""

    def __init__(self, *moves):
        self.moves = moves

    def plan(self, view):
        self.view = view
        return self.moves


class Talk:
    """A gManager and what it sends."""

    def __init__(self, num_instances=3, placement=None, incarnation=1, now_s=0.0):
        facts = ClusterFacts(num_instances, 16, belief=None, link=link)
        self.gmanager = GManager(facts, PARAMS, placement or Planned(), incarnation, now_s)
        self.now_s, self.seqs = now_s, {}

    def beat(self, instance, free=10, needs=(), incarnation=1, headroom=0, batch=0, **fields):
        """A full heartbeat, unless told otherwise. needs: (req_id, blocks, sequence[, grows])."""
        self.seqs[instance] = seq = fields.pop("seq", self.seqs.get(instance, 0) + 1)
        load = Load(10, free, 0, 0, headroom, batch, 0, (), (), (), (), 0.0)
        needs = tuple(Need(*need) for need in needs)
        values = {"full": True, "entries": (), "outcomes": (), "open_order": None, "youngest": None, **fields}
        return self.say(instance, Heartbeat(incarnation, seq, load=load, needs=needs, **values))

    def say(self, instance, message):
        commands = self.gmanager.handle(MessageReceived(instance, message), self.now_s)
        self.gmanager.check_invariants()
        return [(c.receiver, c.message) for c in commands]

    def plan(self, now_s=None):
        self.now_s = self.now_s if now_s is None else now_s
        return [(c.receiver, c.message) for c in self.gmanager.handle(TimerFired(), self.now_s)]


def orders(sent, kind=MoveKvCache):
    return [(receiver, message) for receiver, message in sent if isinstance(message, kind)]


def replies(sent):
    return [message for _, message in sent if isinstance(message, HeartbeatReply)]


# ---- the view ----------------------------------------------------------------------------------------------------------------
def test_changes_are_asked_for_in_full_first():
    talk = Talk()
    (reply,) = replies(talk.beat(0, full=False))
    assert reply.resync
    (reply,) = replies(talk.beat(0, full=True))
    assert not reply.resync
    (reply,) = replies(talk.beat(0, full=False))
    assert not reply.resync


def test_changes_add_and_remove_entries_and_an_older_heartbeat_is_ignored():
    talk = Talk()
    entry = RequestPlacementEntry(7, 1, 4, local=False)
    talk.beat(0, entries=(entry,))
    talk.beat(0, full=False, entries=(RequestPlacementEntry(8, 0, 2, local=True),))
    assert set(talk.gmanager.instances[0].placement) == {(7, 1), (8, 0)}
    talk.beat(0, full=False, entries=(RequestPlacementEntry(7, 1, 0, local=False),))
    assert set(talk.gmanager.instances[0].placement) == {(8, 0)}
    assert talk.beat(0, free=1, seq=2) == []
    assert talk.gmanager.instances[0].load.free_blocks == 10


def test_a_returned_instance_starts_anew_and_its_old_self_is_not_heard():
    talk = Talk()
    talk.beat(0, entries=(RequestPlacementEntry(7, 1, 4, local=False),), seq=9)
    (reply,) = replies(talk.beat(0, incarnation=2, seq=1, full=False))
    assert reply.resync
    assert reply.incarnations == ((0, 2),)
    assert talk.gmanager.instances[0].placement == {}
    assert talk.beat(0, incarnation=1, seq=10) == []


def test_nothing_is_planned_before_a_full_heartbeat_of_everyone():
    talk = Talk(placement=Planned(Move(7, 0, 1, 3)))
    talk.beat(0)
    talk.beat(1)
    assert talk.plan(1.0) == []
    talk.beat(2, full=False)
    assert talk.plan(2.0) == []
    talk.beat(2)
    ((receiver, order),) = orders(talk.plan(3.0))
    assert (receiver, order) == (0, MoveKvCache(OrderId(1, 1), 1, 7, ((1, 1, 3),), "throughput"))


def test_nobody_rests_while_someone_needs_blocks():
    talk = Talk()
    assert [reply.may_rest for reply in replies(talk.beat(0))] == [True]
    assert [reply.may_rest for reply in replies(talk.beat(1, needs=[(7, 99, 1)]))] == [False]
    assert [reply.may_rest for reply in replies(talk.beat(0))] == [False]
    talk.beat(1)
    assert [reply.may_rest for reply in replies(talk.beat(0))] == [True]


def test_who_is_silent_for_too_long_counts_as_dead():
    talk = Talk(placement=Planned(Move(7, 0, 1, 3)))
    for instance in range(3):
        talk.beat(instance)
    talk.now_s = DEAD_AFTER_HEARTBEATS
    talk.beat(0)
    talk.beat(2)
    assert orders(talk.plan(DEAD_AFTER_HEARTBEATS)), "not yet"
    assert orders(talk.plan(DEAD_AFTER_HEARTBEATS + 0.1)) == []
    assert set(talk.gmanager.instances) == {0, 2}


def test_a_lost_instance_is_forgotten_with_its_needs():
    talk = Talk()
    talk.beat(0, needs=[(7, 99, 1)])
    talk.beat(1)
    talk.beat(2)
    talk.gmanager.handle(PeerLost(0), 1.0)
    assert set(talk.gmanager.instances) == {1, 2}
    assert talk.gmanager.view().room_kept_blocks == 0


# ---- capacity ----------------------------------------------------------------------------------------------------------------
def needy(*needs, frees=(0, 10, 10), now_s=0.0):
    """Instance i has frees[i] blocks; instance 0 tells its needs last."""
    talk = Talk(len(frees), now_s=now_s)
    for instance in reversed(range(1, len(frees))):
        talk.beat(instance, frees[instance])
    return talk, talk.beat(0, frees[0], needs)


def test_a_need_is_granted_whole_and_never_by_its_own_instance():
    _, sent = needy((7, 12, 1), frees=(9, 6, 8))
    ((receiver, order),) = orders(sent)
    assert (receiver, order.kind, order.parts) == (0, "capacity", ((1, 1, 6), (2, 1, 6)))


def test_near_idle_instances_share_evenly_and_few_far_ones_take_the_rest():
    ((_, order),) = orders(needy((7, 30, 1), frees=(0, 6, 9, 4, 10, 8))[1])
    assert order.parts == ((1, 1, 6), (2, 1, 9), (4, 1, 10), (5, 1, 5))


def test_the_home_takes_part_with_what_it_need_not_place_elsewhere():
    ((_, order),) = orders(needy((7, 2, 1, False, 7), frees=(9, 10, 10))[1])
    assert order.parts == ((1, 1, 3), (2, 1, 3)), "9 blocks, 3 of them at home"


def test_the_home_keeps_its_headroom_where_the_others_have_room():
    for more, parts in ((4, ((1, 1, 6), (3, 1, 2))), (0, ((1, 1, 6),)), (9, ((1, 1, 6), (3, 1, 2)))):
        talk = Talk(4)
        for instance, free in ((1, 6), (2, 0), (3, 2)):
            talk.beat(instance, free)
        ((_, order),) = orders(talk.beat(0, free=more, headroom=2, needs=[(7, 6, 1, False, more)]))
        assert order.parts == parts


def test_instances_that_run_requests_are_spared():
    talk = Talk(3)
    talk.beat(1, 9, batch=2)
    talk.beat(2, 6)
    ((_, order),) = orders(talk.beat(0, free=0, needs=[(7, 8, 1)]))
    assert order.parts == ((2, 1, 6), (1, 1, 2))


def test_large_shares_are_handed_out_in_turns():
    ((_, order),) = orders(needy((7, 100, 1), frees=(0, 60, 60))[1])
    turns = [(creditor, count) for creditor, _, count in order.parts]
    assert turns == [(1, 16), (2, 16), (1, 16), (2, 16), (1, 16), (2, 16), (1, 2), (2, 2)]


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 50), max_size=8), st.integers(0, 300))
def test_shares_are_as_equal_as_the_rooms_allow(rooms, wanted):
    shares = share_evenly(rooms, wanted)
    assert sum(shares.values()) == min(wanted, sum(rooms.values()))
    assert all(0 < n <= rooms[i] for i, n in shares.items())
    level = max(shares.values(), default=0)
    assert all(shares.get(i, 0) >= min(room, level - 1) for i, room in rooms.items())


def test_a_need_that_does_not_fit_gets_nothing_and_growth_what_there_is():
    assert orders(needy((7, 15, 1), frees=(9, 6, 8))[1]) == []
    ((_, order),) = orders(needy((7, 15, 1, True), frees=(9, 6, 8))[1])
    assert order.parts == ((2, 1, 8), (1, 1, 6))


def test_headroom_of_creditors_is_left_alone():
    talk = Talk(2)
    talk.beat(1, free=6, headroom=2)
    assert orders(talk.beat(0, needs=[(7, 5, 1)])) == []
    ((_, order),) = orders(talk.beat(0, needs=[(7, 4, 1)]))
    assert order.parts == ((1, 1, 4),)


def test_needs_are_met_first_come_first_served_and_throughput_plans_leave_their_room():
    talk, sent = needy((7, 12, 5), (8, 12, 3))
    ((_, order),) = orders(sent)
    assert order.req_id == 8
    assert talk.gmanager.view().room_kept_blocks == 24


@pytest.mark.parametrize("end", ["outcome", "ttl"])
def test_one_order_is_in_flight_until_its_outcome_is_told_or_its_time_is_over(end):
    talk, sent = needy((7, 5, 1), (8, 5, 2))
    ((_, first),) = orders(sent)
    talk.now_s = TTL_S - 0.01
    assert orders(talk.beat(0, needs=[(8, 5, 2)])) == []
    if end == "outcome":
        sent = talk.beat(0, needs=[(8, 5, 2)], outcomes=((first.order, "refused"),))
    else:
        talk.now_s = TTL_S
        sent = talk.beat(0, needs=[(8, 5, 2)])
    ((_, second),) = orders(sent)
    assert second.req_id == 8
    assert second.order > first.order


def test_what_an_order_in_flight_takes_is_not_promised_again():
    talk, sent = needy((7, 5, 1), frees=(0, 6))
    ((_, first),) = orders(sent)
    assert orders(talk.beat(0, needs=[(8, 5, 2)], outcomes=((first.order, "accepted"),))) == []
    talk.beat(1, free=6)
    assert orders(talk.beat(0, needs=[(8, 5, 2)]))


def test_a_restarted_gmanager_waits_for_orders_that_are_still_being_granted():
    """A grant in flight: whoever carries it out says so, and nothing else is granted meanwhile."""
    talk = Talk(incarnation=2)
    talk.beat(1, needs=[(8, 3, 2)])
    talk.beat(2)
    assert orders(talk.beat(0, open_order=OrderId(1, 5))) == []
    talk.beat(0, outcomes=((OrderId(1, 5), "accepted"),))
    ((_, order),) = orders(talk.beat(1, needs=[(8, 3, 2)]))
    assert order.order == OrderId(2, 1)


# ---- room for the oldest -----------------------------------------------------------------------------------------------------
def pressing(youngest, need_sequence=3):
    """A need that nobody can meet has waited for a lease; youngest: (sequence, req_id) of instance 1."""
    talk = Talk(2)
    talk.beat(1, free=0, youngest=youngest)
    talk.beat(0, free=0, needs=[(7, 5, need_sequence)])
    talk.now_s = PARAMS.lease_s
    talk.beat(1, free=0, youngest=youngest)
    return talk, talk.beat(0, free=0, needs=[(7, 5, need_sequence)])


def test_the_youngest_is_preempted_for_an_older_need_one_at_a_time():
    talk, sent = pressing(youngest=(9, 4))
    assert orders(sent, Preempt) == [(1, Preempt(OrderId(1, 1), 2, 4))]
    assert orders(talk.plan(), Preempt) == [], "who is youngest now is not known yet"
    talk.beat(1, free=0, youngest=(8, 5))
    assert [(r, m.req_id) for r, m in orders(talk.plan(), Preempt)] == [(1, 5)]


@pytest.mark.parametrize("youngest", [(2, 4), (3, 7), None])
def test_an_older_request_is_never_preempted_for_a_younger_need(youngest):
    assert orders(pressing(youngest)[1], Preempt) == []


def test_nobody_is_preempted_or_held_back_for_a_need_that_is_new():
    talk = Talk(2)
    talk.beat(1, free=0, youngest=(9, 4))
    sent = talk.beat(0, free=0, needs=[(7, 5, 3)])
    assert orders(sent, Preempt) == []
    assert replies(sent)[0].barrier is None


def test_the_barrier_is_the_oldest_pressing_need():
    talk, sent = pressing(youngest=None)
    assert replies(sent)[0].barrier == 3
    assert replies(talk.beat(1, needs=[(8, 5, 1)]))[0].barrier == 3, "an older need that is new presses nobody yet"
    assert replies(talk.beat(0))[0].barrier is None
