"""Dispatcher: loads, attempts, lost and returned instances, aborts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.dispatcher import Dispatcher, DispatchView
from perfmodel.errors import InputError
from perfmodel.messages import (
    AbortRequest,
    Finish,
    LoadReport,
    MessageReceived,
    PeerLost,
    PeerReturned,
    Request,
    RequestAborted,
    RequestArrived,
    RequestDone,
    RequestOutcome,
    Send,
    SubmitRequest,
)
from perfmodel.policies import DISPATCH


class Talk:
    """A dispatcher; what it sends comes back as (instance, "submit" or "abort", req_id, attempt), endings as (req_id, status)."""

    def __init__(self, num_instances=2, policy="least-loaded"):
        self.dispatcher = Dispatcher(num_instances, 16, DISPATCH[policy]() if isinstance(policy, str) else policy)

    def tell(self, event, now_s=0.0):
        commands = self.dispatcher.handle(event, now_s)
        self.dispatcher.check_invariants()
        return [self._short(command) for command in commands]

    def _short(self, command):
        match command:
            case Send(instance, SubmitRequest(request, attempt, _)):
                return (instance, "submit", request.req_id, attempt)
            case Send(instance, AbortRequest(req_id, attempt)):
                return (instance, "abort", req_id, attempt)
            case Finish(outcome):
                return (outcome.req_id, outcome.status)

    def arrive(self, *req_ids, tokens=31):
        return [sent for req_id in req_ids for sent in self.tell(RequestArrived(Request(req_id, tokens)))]

    def done(self, instance, req_id, attempt=1, received=1, load_blocks=0, status="finished"):
        outcome = RequestOutcome(req_id, status, "", instance, 1, 0.0, 0.0, 0.0, 1.0)
        return self.tell(MessageReceived(instance, RequestDone(attempt, outcome, LoadReport(received, load_blocks))))

    @property
    def loads(self):
        return self.dispatcher.view.load_blocks


def test_a_request_goes_to_the_least_loaded_and_counts_until_the_instance_reports():
    talk = Talk()
    assert talk.arrive(1, 2, 3) == [(0, "submit", 1, 1), (1, "submit", 2, 1), (0, "submit", 3, 1)]
    assert talk.loads == [4, 2]
    talk.tell(MessageReceived(0, LoadReport(received=1, load_blocks=7)))
    assert talk.loads == [9, 2], "request 3 was still on its way"
    assert talk.done(0, 1, received=2, load_blocks=2) == [(1, "finished")]
    assert talk.loads == [2, 2]


def test_requests_of_a_lost_instance_are_tried_again_and_only_the_new_attempt_counts():
    talk = Talk()
    talk.arrive(1, 2)
    assert talk.tell(PeerLost(0)) == [(1, "submit", 1, 2)]
    assert talk.tell(PeerLost(0)) == [], "told once more"
    assert talk.done(0, 1, attempt=1) == []
    assert talk.done(1, 1, attempt=2) == [(1, "finished")]
    assert talk.done(1, 1, attempt=2) == []


def test_nothing_is_sent_to_a_lost_instance():
    talk = Talk(policy="round-robin")
    talk.tell(PeerLost(0))
    assert [sent[0] for sent in talk.arrive(1, 2, 3)] == [1, 1, 1]


def test_without_any_instance_requests_wait_for_the_first_to_return():
    talk = Talk()
    talk.arrive(1)
    talk.tell(PeerLost(1))
    assert talk.tell(PeerLost(0)) == []
    assert talk.arrive(2) == []
    sent = talk.tell(PeerReturned(1, 2))
    assert [(instance, kind, req_id) for instance, kind, req_id, _ in sent] == [(1, "submit", 1), (1, "submit", 2)]


def test_an_instance_that_was_alive_all_the_time_is_told_which_attempts_do_not_count():
    talk = Talk()
    talk.arrive(1)
    talk.tell(PeerLost(0))
    assert talk.tell(PeerReturned(0, 1)) == [(0, "abort", 1, 1)]
    assert talk.loads[0] == 0
    assert talk.tell(PeerReturned(0, 1)) == []


def test_a_return_under_a_new_incarnation_is_a_loss_that_nobody_noticed():
    talk = Talk()
    talk.arrive(1, 2)
    sent = talk.tell(PeerReturned(0, 2))
    assert (1, "submit", 1, 2) in sent


# ---- aborts ------------------------------------------------------------------------------------------------------------------
def test_an_abort_goes_to_the_current_attempt():
    talk = Talk()
    talk.arrive(1)
    talk.tell(PeerLost(0))
    assert talk.tell(RequestAborted(1)) == [(1, "abort", 1, 2)]
    assert talk.done(1, 1, attempt=2, status="aborted") == [(1, "aborted")]
    assert talk.tell(RequestAborted(1)) == []


def test_an_aborted_request_is_not_tried_again_when_its_instance_is_lost():
    """Its instance could not end it any more: it has one ending all the same."""
    talk = Talk()
    talk.arrive(1)
    talk.tell(RequestAborted(1))
    assert talk.tell(PeerLost(0)) == [(1, "aborted")]
    assert talk.done(0, 1) == []


def test_an_abort_while_no_instance_is_alive_ends_the_request_at_once():
    talk = Talk(num_instances=1)
    talk.tell(PeerLost(0))
    talk.arrive(1)
    assert talk.tell(RequestAborted(1)) == [(1, "aborted")]
    assert talk.tell(PeerReturned(0, 2)) == []


@pytest.mark.parametrize("choice", [2, -1, None, 0.5])
def test_a_policy_that_names_no_instance_is_refused_by_name(choice):
    class Lost:
        def choose(self, view, request):
            return choice

    with pytest.raises(InputError, match=r"policy Lost sent request 1 to instance .* \(allowed: 0 to 1\)"):
        Talk(policy=Lost()).arrive(1)


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0.0, 1.0, 2.0, float("inf")]))),
    st.data(),
)
def test_the_least_loaded_is_found_as_by_looking_at_all(num_instances, changes, data):
    view = DispatchView(num_instances, 16, [0.0] * num_instances)
    for instance, blocks in changes:
        view.set_load(instance % num_instances, blocks)
    first = data.draw(st.integers(0, num_instances))
    in_turn = [i % num_instances for i in range(first, first + num_instances)]
    assert view.least_loaded(first) == min(in_turn, key=lambda i: view.load_blocks[i])
