"""The best number of blocks to lend, against a scan over every number with an own, scalar pricing of both instances."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.catalogue import load_engine, load_gpu, load_link, load_model
from perfmodel.borrowing import remote_layer_s
from perfmodel.cost import CostModel
from perfmodel.curves import analytic_curves
from perfmodel.gain import Pricer
from perfmodel.messages import Chunk, StartIterations
from perfmodel.pricing import Surroundings, price_step
from perfmodel.specs import InstanceSpec
from perfmodel.view import ClusterView, Load, Movable, RemoteRead, SchedulerParams

BLOCK_TOKENS = 256  # large ones: a scan over few blocks then spans contexts that hide remote work
DEBTOR, CREDITOR, THIRD, FOURTH = range(4)
NVLINK, ETHERNET = load_link("nvlink3"), load_link("ethernet-100g")


@cache
def belief(engine, pipeline_parallel, scale):
    spec = InstanceSpec(
        load_model("llama2-7b"),
        load_gpu("a100-80gb"),
        load_engine(engine),
        NVLINK,
        ETHERNET,
        pipeline_parallel=pipeline_parallel,
    )
    return CostModel(spec, analytic_curves(spec.gpu, spec.model.dtype_bytes), dict(scale))


def reads(peers):
    one = st.tuples(st.sampled_from(peers), st.integers(1, 4), st.integers(0, 90_000))
    return st.lists(one, max_size=2, unique_by=lambda r: r[0]).map(lambda rs: tuple(RemoteRead(*r) for r in rs))


@st.composite
def loads(draw, peers):
    batch = draw(st.one_of(st.integers(0, 40), st.integers(1, 3), st.integers(40, 300)))
    longest = draw(st.lists(st.integers(0, 250), min_size=1 if batch else 0, max_size=2))
    requests = tuple(Movable(i, 1000 * (9 - i), blocks) for i, blocks in enumerate(longest))
    return Load(
        total_blocks=draw(st.integers(300, 500)),
        free_blocks=draw(st.integers(0, 250)),
        pledged_blocks=draw(st.sampled_from([0, 0, 7])),
        lent_blocks=0,
        headroom_blocks=draw(st.integers(0, 9)),
        batch=batch,
        context_tokens=draw(st.one_of(st.integers(batch, 200_000), st.integers(60_000, 120_000))) if batch else 0,
        remote=draw(reads(peers)) if batch else (),
        served=draw(reads(peers)),
        waiting=tuple(draw(st.lists(st.one_of(st.integers(1, 3000), st.integers(1, 40_000)), max_size=8))),
        longest=requests,
        iteration_s=draw(st.floats(0.0, 0.2)),
    )


@st.composite
def views(draw):
    scale = draw(
        st.sampled_from([(), (("decode_attention", 0.01),), (("decode_attention", 2.0),), (("host", 0.0001),)])
    )
    near = draw(st.booleans())
    return ClusterView(
        loads={
            DEBTOR: draw(loads((CREDITOR, THIRD, FOURTH))),
            CREDITOR: draw(loads((DEBTOR, THIRD, FOURTH))),
            THIRD: draw(loads((DEBTOR, CREDITOR))),
        },  # the fourth is dead
        belief=belief(draw(st.sampled_from(["graphs", "eager-2023"])), draw(st.sampled_from([1, 1, 2])), scale),
        params=SchedulerParams(),
        block_tokens=BLOCK_TOKENS,
        link=lambda a, b: NVLINK if near or {a, b} == {DEBTOR, THIRD} else ETHERNET,
    )


# ---- the scan: paper.md §4 and design.md §3 once more, one number at a time ---------------------
def admitted(load, room):
    """Waiting prompts that fit in `room` blocks in all, first come first served."""
    idle, taken = load.batch == 0 and not load.longest, []
    for tokens in load.waiting:
        room -= (tokens + 1 + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        if room < (0 if idle else load.headroom_blocks):
            break
        taken.append(tokens)
        idle = False
    return taken


def live(view, reads):
    return [read for read in reads if read.rows and read.peer in view.loads]


def iteration_s(view, instance, taken, context_tokens, remote, share):
    load, model = view.loads[instance], view.belief.instance.model
    rows, reads = load.batch + len(taken), live(view, remote)
    kernel_s, launch_s, host_s = view.belief.iteration_terms(rows, rows, rows)
    local_s = view.belief.decode_attention_s(rows, max(0, context_tokens + sum(taken) + len(taken)))
    peer_s = view.belief.instance.engine.exchange_s_per_layer_per_peer * view.belief.scale["host"] * model.num_layers
    remote_s = max((wait_s(view, instance, read) for read in reads), default=0.0) + peer_s * max(0, len(reads) - 1)
    busy_s = kernel_s + max(local_s, remote_s) + host_s
    return max(busy_s / max(0.1, 1.0 - share), launch_s + peer_s * len(reads) + host_s)


def wait_s(view, debtor, read):
    peer = view.loads[read.peer]
    busy_s = peer.iteration_s if peer.batch or peer.longest else 0.0
    busy_s = max(busy_s, last_chunk_s(view.belief, max(peer.waiting, default=0)))
    layer_s = remote_layer_s(view.belief, view.link(debtor, read.peer), read.rows, read.tokens, busy_s)
    return view.belief.instance.model.num_layers * layer_s


def last_chunk_s(belief, prompt_tokens):
    if not prompt_tokens:
        return 0.0
    budget = belief.instance.token_budget
    chunk = Chunk(0, min(prompt_tokens, budget), max(0, prompt_tokens - budget), last=True)
    step = StartIterations(1, 0, 0, 0, (chunk,), 1, (), ())
    return price_step(belief, step, Surroundings(0.0, lambda peer: NVLINK, lambda peer: 0.0)).time.total_s(1)


def period_s(view, instance):
    load = view.loads[instance]
    return iteration_s(view, instance, [], load.context_tokens, load.remote, 0.0)


def served_share(view, reads):
    reads = [read for read in live(view, reads) if view.loads[read.peer].batch]
    return sum(view.belief.micro_attention_s(r.rows, r.tokens) / period_s(view, r.peer) for r in reads)


def read_after(view, blocks):
    """What the debtor reads on the creditor with `blocks` blocks moved."""
    debtor = view.loads[DEBTOR]
    rows, tokens = next(((r.rows, r.tokens) for r in debtor.remote if r.peer == CREDITOR), (0, 0))
    more = blocks > 0 and rows < max(1, debtor.batch)  # a row that reads there already is not counted twice
    return RemoteRead(CREDITOR, rows + more, tokens + BLOCK_TOKENS * blocks)


def both_tok_per_s(view, blocks):
    debtor, creditor, read = view.loads[DEBTOR], view.loads[CREDITOR], read_after(view, blocks)
    taken = admitted(debtor, debtor.free_blocks + debtor.pledged_blocks + blocks)
    remote = [*(r for r in debtor.remote if r.peer != CREDITOR), read]
    kept_tokens, share = debtor.context_tokens - BLOCK_TOKENS * blocks, served_share(view, debtor.served)
    total = (debtor.batch + len(taken)) / iteration_s(view, DEBTOR, taken, kept_tokens, remote, share)

    taken = admitted(creditor, creditor.free_blocks + creditor.pledged_blocks - blocks)
    share = served_share(view, [r for r in creditor.served if r.peer != DEBTOR])
    if read.rows:
        share += view.belief.micro_attention_s(read.rows, read.tokens) / period_s(view, DEBTOR)
    serving_s = iteration_s(view, CREDITOR, taken, creditor.context_tokens, creditor.remote, share)
    return total + (creditor.batch + len(taken)) / serving_s


def is_hidden(view, blocks):
    debtor = view.loads[DEBTOR]
    local_s = view.belief.decode_attention_s(debtor.batch, max(0, debtor.context_tokens - BLOCK_TOKENS * blocks))
    return wait_s(view, DEBTOR, read_after(view, blocks)) <= local_s


def offer(view, limit, hidden=True):
    pricer = Pricer(view, view.loads)
    reads = pricer.reads(DEBTOR, CREDITOR)
    block_max = pricer.hidden_blocks(DEBTOR, reads[1], limit) if hidden else limit
    return block_max, pricer.pair(DEBTOR, CREDITOR, reads).best(block_max)


def check_best(view, block_max, found):
    values = [both_tok_per_s(view, blocks) for blocks in range(block_max + 1)]
    best = max(values)
    equals = [blocks for blocks, value in enumerate(values) if value >= best * (1 - 1e-12)]
    assert found.num_blocks == equals[0], (found, equals, best - values[found.num_blocks])
    assert found.gain_tok_per_s == pytest.approx(best - values[0], rel=1e-6, abs=best * 1e-12)


def check_against_scan(view, limit):
    """Whatever the cap: blocks that do not hide are priced by their wait, and the best is exact there too."""
    assume(view.loads[DEBTOR].batch)
    limit = min(limit, view.loads[CREDITOR].free_blocks, max(r.movable_blocks for r in view.loads[DEBTOR].longest))
    check_best(view, *offer(view, limit, hidden=False))


@settings(max_examples=150, deadline=None)
@given(views(), st.integers(0, 120))
def test_best_equals_a_scan(view, limit):
    check_against_scan(view, limit)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(views(), st.integers(0, 250))
def test_best_equals_a_scan_at_length(view, limit):
    check_against_scan(view, limit)


@settings(max_examples=100, deadline=None)
@given(views(), st.integers(0, 120))
def test_the_cap_is_the_last_number_of_blocks_that_hides(view, limit):
    block_max, found = offer(view, limit)
    assert 0 <= found.num_blocks <= block_max
    assert all(is_hidden(view, blocks) for blocks in range(1, block_max + 1))
    assert block_max == limit or not is_hidden(view, block_max + 1)


@pytest.fixture
def view():
    busy = Load(300, 10, 0, 0, 3, 1, 60_000, (), (), (), (Movable(0, 60_000, 200),), 0.02)
    idle = Load(300, 300, 0, 0, 3, 0, 0, (), (), (), (), 0.0)
    return ClusterView(
        {DEBTOR: busy, CREDITOR: idle}, belief("graphs", 1, ()), SchedulerParams(), BLOCK_TOKENS, lambda a, b: NVLINK
    )


def with_loads(view, debtor=None, creditor=None):
    changed = {DEBTOR: debtor or {}, CREDITOR: creditor or {}}
    return replace(view, loads={i: load._replace(**changed[i]) for i, load in view.loads.items()})


def test_a_creditor_about_to_compute_a_long_prompt_hides_nothing(view):
    lent, _ = offer(view, 100)
    assert lent > 0
    assert offer(with_loads(view, creditor={"waiting": (100_000,)}), 100)[0] == 0


def test_ties_go_to_the_fewest_blocks(view):
    """A host-bound debtor gains by admissions alone; four prompts want one block more than it has."""
    view = replace(view, belief=belief("eager-2023", 1, (("host", 3.0),)))
    view = with_loads(view, debtor={"waiting": (300, 500, 511, 511, 200_000)})
    block_max, found = offer(view, 100)
    assert block_max > 3
    assert found.num_blocks == 1, "7 of 10 free blocks are beyond the headroom, four prompts need 8"
    check_best(view, block_max, found)


# a creditor that has something to lose
WORKING = {"batch": 5, "context_tokens": 4000, "longest": (Movable(9, 800, 3),)}
HOST_BOUND = belief("eager-2023", 1, (("host", 1.5),))  # launches: 24 ms an iteration


def test_the_best_may_lie_where_launches_hide_the_attention(view):
    """From there on the debtor gains nothing, and the creditor goes on losing."""
    view = with_loads(replace(view, belief=HOST_BOUND), debtor={"batch": 30}, creditor=WORKING)
    block_max, found = offer(view, 200)
    assert 1 < found.num_blocks < block_max
    check_best(view, block_max, found)


def test_the_best_may_lie_where_another_creditor_keeps_the_debtor_waiting(view):
    view = with_loads(view, debtor={"batch": 30, "remote": (RemoteRead(THIRD, 1, 40_000),)}, creditor=WORKING)
    view.loads[THIRD] = view.loads[CREDITOR]
    block_max, found = offer(view, 200)
    assert 1 < found.num_blocks < block_max
    check_best(view, block_max, found)


def test_the_best_may_lie_just_before_the_creditor_shrinks(view):
    """The debtor gains a little with every block; one more and a prompt that waits at the creditor no longer fits."""
    creditor = WORKING | {"batch": 2, "free_blocks": 60, "waiting": (300,) * 10}
    view = with_loads(view, debtor={"batch": 30}, creditor=creditor)
    block_max, found = offer(view, 57)
    assert found.num_blocks == 60 - 3 - 20 < block_max
    check_best(view, block_max, found)


def test_the_best_may_lie_where_micro_attention_leaves_its_floor(view):
    """A read of next to nothing costs the creditor as much as one of a few blocks; what comes on top is not worth it."""
    working = WORKING | {"batch": 100}
    reads = (RemoteRead(CREDITOR, 1, 0), RemoteRead(THIRD, 1, 10_000))
    view = with_loads(view, debtor={"remote": reads}, creditor=working)
    view.loads[THIRD] = view.loads[CREDITOR]._replace(batch=0, longest=())
    block_max, found = offer(view, 200)
    assert 1 < found.num_blocks < 20 < block_max
    check_best(view, block_max, found)


def test_the_best_may_lie_just_before_a_prompt_is_admitted(view):
    """A long prompt would add one row and slow thirty."""
    view = with_loads(view, debtor={"batch": 30, "waiting": (200_000 // 16,)})
    block_max, found = offer(view, 60)
    check_best(view, block_max, found)
    assert found.num_blocks == 12500 // BLOCK_TOKENS + 1 - 7 - 1


def test_nothing_to_gain_is_no_blocks(view):
    """The debtor is host-bound and nobody waits: lending would add launches."""
    view = replace(view, belief=belief("eager-2023", 1, (("host", 3.0),)))
    view = with_loads(view, creditor={"batch": 30, "context_tokens": 9000, "longest": (Movable(9, 300, 1),)})
    assert offer(view, 100)[1] == (0, 0.0)


def test_several_maxima_are_told_apart(view):
    """The debtor gains in steps, the creditor loses in steps: the best is in the middle, neither end nor the first maximum."""
    waiting = (2000, 2000, 2000, 40_000)
    creditor = {
        "batch": 20,
        "context_tokens": 20_000,
        "free_blocks": 60,
        "waiting": (300,) * 20,
        "longest": (Movable(9, 300, 1),),
    }
    view = with_loads(view, debtor={"waiting": waiting}, creditor=creditor)
    block_max, found = offer(view, 57)
    assert 1 < found.num_blocks < block_max
    check_best(view, block_max, found)


def test_a_creditor_hides_what_it_serves_under_its_launches(view):
    """A host-bound creditor loses nothing until its kernels and what it serves fill its iterations."""
    creditor = WORKING | {"batch": 60, "context_tokens": 20_000}
    view = with_loads(
        replace(view, belief=HOST_BOUND), debtor={"batch": 30, "context_tokens": 150_000}, creditor=creditor
    )
    block_max, found = offer(view, 200)
    assert 1 < found.num_blocks < block_max
    check_best(view, block_max, found)


def test_the_creditor_slows_by_its_share_of_time(view):
    """The same reads from a debtor that iterates half as often cost half as much (design.md §3)."""
    view = with_loads(view, creditor=WORKING | {"batch": 100})
    pricer = Pricer(view, view.loads)
    pair = pricer.pair(DEBTOR, CREDITOR, pricer.reads(DEBTOR, CREDITOR))
    slower = replace(pair, period_s=2 * pair.period_s)
    none = replace(pair, period_s=float("inf"))
    lost = [none.tok_per_s(40)[1] - p.tok_per_s(40)[1] for p in (pair, slower)]
    assert lost[1] > 0
    assert lost[0] == pytest.approx(2 * lost[1])


def test_a_read_between_the_two_in_the_other_direction_stays(view):
    """The creditor borrows from the debtor too: its wait and the debtor's service are priced, the move does not change them."""
    view = with_loads(
        view,
        debtor={"batch": 30, "served": (RemoteRead(CREDITOR, 1, 30_000),)},
        creditor=WORKING | {"remote": (RemoteRead(DEBTOR, 1, 30_000),)},
    )
    check_best(view, *offer(view, 100))
