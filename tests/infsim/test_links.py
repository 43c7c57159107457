"""Links: shares of the bandwidth, completion times, conservation of bytes, independence of order."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infsim.links import Links, PortName, fair_share
from perfmodel.specs import LinkSpec

FAST = LinkSpec("nvlink3", 230e9, 2e-6)
CARD = LinkSpec("pcie4", 25e9, 10e-6)
NODE_CARD = LinkSpec("ethernet-100g", 12.5e9, 20e-6, per_node=True)
BLOCK_BYTES = 16 * 327_680  # LLaMA2-70B


def four_on_two_nodes(inter=NODE_CARD, num_gpus=1):
    return Links((0, 0, 1, 1), num_gpus, FAST, inter)


def run_out(links):
    """Complete everything; {transfer: time}."""
    ends = {}
    while (head := links.next_completion()) is not None:
        done = links.complete(head[0])
        links.check_invariants()
        assert done and done[0] == head[1], "what was announced is what completes"
        ends |= dict.fromkeys(done, head[0])
    return ends


def test_one_block_of_llama2_70b_takes_what_the_link_allows_and_two_take_twice_as_long():
    alone_s = BLOCK_BYTES / 25e9
    assert round(alone_s * 1e3, 2) == 0.21
    links = four_on_two_nodes(CARD)
    links.start((1,), 0, 2, BLOCK_BYTES, 0.0)
    assert run_out(links) == {(1,): alone_s}
    links.start((1,), 0, 2, BLOCK_BYTES, 1.0)
    links.start((2,), 0, 2, BLOCK_BYTES, 1.0)
    ends = run_out(links)
    assert ends == {(1,): ends[2,], (2,): pytest.approx(1 + 2 * alone_s)}


def test_a_late_comer_takes_half_and_leaves_its_half_behind():
    links = four_on_two_nodes(CARD)
    links.start((1,), 0, 2, 25e9, 0.0)  # alone: 1 s
    links.start((2,), 0, 3, 5e9, 0.5)  # 0.5 s, both at half rate until 0.9 s
    assert run_out(links) == {(2,): pytest.approx(0.9), (1,): pytest.approx(1.2)}


def test_directions_and_pairs_do_not_disturb_each_other():
    links = four_on_two_nodes(CARD)
    for i, (src, dst) in enumerate([(0, 2), (2, 0), (1, 3), (3, 1)]):
        links.start((i,), src, dst, 25e9, 0.0)
    assert set(run_out(links).values()) == {1.0}


def test_one_network_card_a_node_is_shared_by_its_instances():
    links = four_on_two_nodes(NODE_CARD)
    links.start((1,), 0, 2, 12.5e9, 0.0)
    links.start((2,), 1, 3, 12.5e9, 0.0)
    assert links.active(0) == links.active(1) == (6.25e9, 0.0)
    assert links.active(2) == (0.0, 6.25e9)
    assert set(run_out(links).values()) == {2.0}


def test_transfers_inside_a_node_use_the_intra_link_of_each_gpu():
    links = four_on_two_nodes(NODE_CARD, num_gpus=2)
    links.start((1,), 0, 1, 460e9, 0.0)
    links.start((2,), 0, 2, 12.5e9, 0.0)
    assert links.active(0) == (460e9 + 12.5e9, 0.0)
    assert run_out(links) == {(1,): 1.0, (2,): 1.0}


def test_a_paced_transfer_leaves_the_rest_of_the_link_to_others():
    links = four_on_two_nodes(CARD)
    links.start((1,), 0, 2, 5e9, 0.0, rate_cap=5e9)
    links.start((2,), 0, 3, 20e9, 0.0)
    assert links.share_bytes_per_s(0, 3) == pytest.approx(10e9)
    assert run_out(links) == {(1,): pytest.approx(1.0), (2,): pytest.approx(1.0)}


def test_cancel_returns_what_has_not_flowed_and_frees_the_share():
    links = four_on_two_nodes(CARD)
    links.start((1,), 0, 2, 25e9, 0.0)
    links.start((2,), 0, 2, 25e9, 0.0)
    assert links.cancel((1,), 1.0) == pytest.approx(12.5e9)
    assert run_out(links) == {(2,): pytest.approx(1.5)}
    assert links.moved_bytes(1.5)[PortName("inter", "egress", 0)] == pytest.approx(37.5e9)
    with pytest.raises(KeyError):
        links.cancel((1,), 1.5)


def test_a_late_caller_gets_the_same_order_and_the_bytes_are_exact():
    links = four_on_two_nodes(CARD)
    links.start((1,), 0, 2, 25e9, 0.0)
    links.start((3,), 0, 3, 5e9, 0.0)
    links.start((2,), 0, 3, 5e9, 0.0)
    assert links.complete(0.5) == []
    assert links.complete(100.0) == [(2,), (3,), (1,)], "equal times in the order of the ids"
    assert links.moved_bytes(100.0)[PortName("inter", "egress", 0)] == pytest.approx(35e9, rel=1e-12)


def test_a_change_after_an_unnoticed_completion_is_refused():
    links = four_on_two_nodes(CARD)
    links.start((1,), 0, 2, 25e9, 0.0)
    with pytest.raises(AssertionError, match="was through before"):
        links.start((2,), 0, 2, 1.0, 2.0)


@given(st.floats(1.0, 1e3), st.lists(st.one_of(st.floats(0.01, 1e3), st.just(inf)), max_size=8))
def test_fair_share_fills_the_capacity_and_never_more(capacity, caps):
    share = fair_share(capacity, caps)
    used = sum(min(cap, share) for cap in caps)
    assert used <= capacity * (1 + 1e-12)
    assert share == inf or used == pytest.approx(capacity)


TRANSFERS = st.lists(
    st.tuples(
        st.permutations(range(4)).map(lambda p: p[:2]),
        st.floats(0.0, 50e9),
        st.sampled_from([0.0, 0.0, 0.3, 0.31, 1.7]),
        st.sampled_from([inf, inf, 1e9, 7e9, 40e9]),
    ),
    min_size=1,
    max_size=8,
)


def replay(links, starts):
    """`starts`: (id, (src, dst), bytes, start_s, cap), in order of time. {transfer: end}."""
    ends = {}
    for transfer_id, (src, dst), num_bytes, start_s, cap in starts:
        while (head := links.next_completion()) is not None and head[0] <= start_s:
            ends |= dict.fromkeys(links.complete(head[0]), head[0])
        links.start(transfer_id, src, dst, num_bytes, start_s, cap)
        links.check_invariants()
    return ends | run_out(links)


@settings(max_examples=150, deadline=None)
@given(TRANSFERS, st.sampled_from([CARD, NODE_CARD]), st.randoms(use_true_random=False))
def test_bytes_are_conserved_capacity_holds_and_order_does_not_matter(transfers, inter, random):
    starts = [((i,), *transfer) for i, transfer in enumerate(transfers)]
    shuffled = random.sample(starts, len(starts))
    links = four_on_two_nodes(inter)
    ends = replay(links, sorted(starts, key=lambda s: s[3]))
    again = replay(four_on_two_nodes(inter), sorted(shuffled, key=lambda s: s[3]))
    assert ends == pytest.approx(again, rel=1e-9)
    last_s = max([*ends.values(), 2.0])
    moved = links.moved_bytes(last_s)
    for direction in ("egress", "ingress"):
        total = sum(num_bytes for name, num_bytes in moved.items() if name.direction == direction)
        assert total == pytest.approx(sum(t[1] for t in transfers), rel=1e-9, abs=1e-3)
    for transfer_id, (src, dst), num_bytes, start_s, cap in starts:
        alone_s = num_bytes / min(cap, links.spec(src, dst).bytes_per_s)
        assert ends[transfer_id] >= start_s + alone_s * (1 - 1e-9), "faster than the link alone"
