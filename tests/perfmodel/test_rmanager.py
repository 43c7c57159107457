"""RManager: who starts when somebody ahead has gone, preemption, attempts, timers."""

import pytest
from wired import PARAMS, Wired, make_manager

from perfmodel.heartbeats import REST_PERIODS
from perfmodel.messages import (
    DISPATCHER,
    GMANAGER,
    AbortRequest,
    HeartbeatReply,
    IterationsDone,
    MessageReceived,
    PeerLost,
    Request,
    SubmitRequest,
)


def one(num_blocks=10, **options):
    return Wired(make_manager(0, num_blocks, **options))


def abort(wired, req_id, attempt=1):
    wired.hear(0, MessageReceived(DISPATCHER, AbortRequest(req_id, attempt)))


def running(wired):
    batcher = wired.managers[0].batcher
    return sorted([*batcher.decoding, *(row.req_id for row in batcher.prefilling)])


def waiting(wired):
    return [row.req_id for row in wired.managers[0].batcher.waiting]


def test_who_waits_behind_an_aborted_prompt_starts():
    """Found by chaos: nobody planned again, and an idle instance waited for ever."""
    wired = one()
    wired.submit(0, 1, 230)  # needs more than the instance has
    wired.submit(0, 2, 50)
    assert (running(wired), waiting(wired)) == ([], [1, 2])
    abort(wired, 1)
    assert (running(wired), waiting(wired)) == ([2], [])
    assert wired.ended() == {1: "aborted"}


def test_an_older_request_starts_ahead_of_one_that_cannot():
    """Found by chaos: a request whose instance was lost came back behind a waiting younger one."""
    wired = one()
    wired.submit(0, 5, 230)
    wired.submit(0, 3, 50, sequence=3)
    assert (running(wired), waiting(wired)) == ([3], [5])


def test_an_aborted_row_leaves_at_the_next_boundary():
    wired = one()
    wired.prefill(0, 1, 50)
    abort(wired, 1)
    assert (running(wired), wired.ended()) == ([1], {})
    wired.iterate(0)
    assert (running(wired), wired.ended()) == ([], {1: "aborted"})
    assert wired.managers[0].at_rest


def test_an_abort_of_another_attempt_is_ignored():
    wired = one()
    wired.prefill(0, 1, 50)
    abort(wired, 1, attempt=2)
    assert wired.managers[0].leaving == {}


def test_an_attempt_that_takes_over_a_row_on_its_way_out_starts_again():
    """Found by chaos: its loans were lost while it was to leave, a new attempt kept it, and it ran on without its blocks."""
    wired = Wired(*(make_manager(i) for i in range(2)))
    wired.heartbeat(0)
    wired.prefill(0, 1, 100)
    wired.order(0, 1, [(1, 4)])
    abort(wired, 1)
    wired.hear(0, PeerLost(1))
    wired.hear(0, MessageReceived(DISPATCHER, SubmitRequest(Request(1, 100), 3, 1)))
    wired.iterate(0)
    row = wired.managers[0].rows[1]
    assert (row.num_preemptions, row.remote_blocks, row.attempt) == (1, 0, 3)
    wired.iterate(0, finished=[])
    wired.iterate(0, finished=[1])
    assert wired.ended() == {1: "finished"}


def test_exhaustion_preempts_the_youngest_and_the_oldest_goes_on():
    wired = one(num_blocks=8)
    for req_id in (1, 2):
        wired.submit(0, req_id, 60)  # 4 blocks with the next token
    wired.iterate(0)
    while wired.managers[0].batcher.decoding and len(running(wired)) == 2 and not waiting(wired):
        wired.iterate(0)
    assert (running(wired), waiting(wired)) == ([1], [2])
    assert wired.managers[0].rows[2].num_preemptions == 1


def test_a_row_that_runs_alone_waits_for_a_block_elsewhere_and_asks_for_it():
    wired = one(num_blocks=4)
    wired.prefill(0, 1, 60)
    while running(wired):
        wired.iterate(0)
    (need,) = wired.managers[0].reporter.needs()
    assert (need.req_id, need.grows, need.num_blocks) == (1, True, 4)
    assert wired.managers[0].rows[1].num_preemptions == 0


def test_a_barrier_holds_back_who_came_later():
    wired = one()
    wired.heartbeat(0)
    reply = HeartbeatReply(1, 2, (), resync=False, barrier=4)
    wired.managers[0].reporter.report(0.0)
    wired.hear(0, MessageReceived(GMANAGER, reply))
    for req_id in (5, 4):
        wired.submit(0, req_id, 50)
    assert (running(wired), waiting(wired)) == ([4], [5])


def test_replies_that_come_late_change_nothing():
    wired = one()
    for _ in range(3):
        wired.heartbeat(0)
    late = HeartbeatReply(1, 2, (), resync=True, barrier=4)
    due_s = wired.managers[0].reporter.due_s
    wired.hear(0, MessageReceived(GMANAGER, late))
    assert (wired.managers[0].batcher.barrier, wired.managers[0].reporter.due_s) == (None, due_s)


def rest(wired):
    """An idle instance's second heartbeat says nothing new; returns when the next one is due."""
    for _ in range(2):
        wired.heartbeat(0, may_rest=True)
    return wired.managers[0].reporter.due_s


def test_an_idle_instance_that_has_told_all_rests():
    assert rest(one()) == REST_PERIODS


def test_a_rest_ends_with_news_and_heartbeats_go_on_as_if_it_had_not_been():
    wired = one()
    rest(wired)
    wired.now_s = 1.5
    wired.submit(0, 1, 50)
    assert wired.managers[0].reporter.due_s == 2.0


def test_a_rest_ends_where_blocks_are_lent():
    wired = Wired(*(make_manager(i) for i in range(2)))
    rest(wired)
    wired.heartbeat(1)
    wired.prefill(1, 1, 100)
    wired.order(1, 1, [(0, 4)])
    assert wired.managers[0].reporter.due_s == 1.0


def test_nobody_rests_who_may_not_or_who_works():
    wired = one()
    for _ in range(2):
        wired.heartbeat(0, may_rest=False)
    assert wired.managers[0].reporter.due_s == 1.0
    wired.prefill(0, 1, 50)
    for _ in range(3):
        wired.heartbeat(0, may_rest=True)
    assert wired.managers[0].reporter.due_s == 1.0


@pytest.mark.parametrize(
    ("tokens", "largest", "status"), [(159, 10, None), (160, 10, "rejected"), (400, 26, None), (416, 26, "rejected")]
)
def test_what_no_instance_or_pool_can_hold_is_rejected_at_arrival(tokens, largest, status):
    """prompt + 1 tokens beyond 10 blocks here, or the 26 that the pool has for one request."""
    wired = one(largest_blocks=largest)
    wired.submit(0, 1, tokens)
    assert wired.ended().get(1) == status


def test_iterations_of_a_step_that_is_not_running_are_caught():
    wired = one()
    wired.prefill(0, 1, 50)
    with pytest.raises(AssertionError, match="is not of the step in progress"):
        wired.hear(0, IterationsDone(99, 1, (), ended=True))


def test_lent_blocks_are_asked_back_only_where_they_stand_in_the_way():
    wired = Wired(*(make_manager(i, num_blocks=10) for i in range(2)))
    wired.heartbeat(0)
    wired.prefill(0, 7, 100)
    wired.order(0, 7, [(1, 4)])
    creditor = wired.managers[1]
    wired.submit(1, 8, 90)  # 6 blocks: fits
    assert creditor._reclaim_at_s() == float("inf")
    wired.submit(1, 9, 110)  # 7 blocks: would not, even alone
    wired.iterate(1, finished=[])
    wired.iterate(1, finished=[8])
    due_s = creditor._reclaim_at_s()
    assert due_s == wired.now_s + PARAMS.period_s
    wired.now_s = due_s
    wired.heartbeat(1)
    assert creditor.pool.lent + creditor.pool.reserved < 4


@pytest.mark.parametrize(("tokens", "due_s"), [(90, 0.5), (100, 0.05)])
def test_only_a_request_that_lacks_room_hurries_a_heartbeat(tokens, due_s):
    """While the first one runs, 6 of 10 blocks are free."""
    wired = one()
    wired.submit(0, 1, 50)
    wired.submit(0, 2, tokens)
    assert wired.managers[0].reporter.due_s == due_s
