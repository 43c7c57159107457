"""DistAttention between instances without managers: any partition of a request's sealed blocks gives a single instance's logits."""

import time
from random import Random

import pytest
import torch
from model_tools import nan_pool, random_ids, step
from pool_tools import BLOCK_TOKENS, tiny_decoder

from infreal.dist_attention import ANSWER, QUERY, DistAttention, Query, RemotePart, Serving, tag_of
from infreal.executor import Executor, Text
from infreal.layout import ReadRow, StepRow
from infreal.model import Row, make_batch
from infreal.transport import TransportError
from infreal.transport.in_process import CooperativeTransport, InProcessNetwork, run_ranks
from perfmodel.messages import LoanId

pytestmark = pytest.mark.usefixtures("one_thread")
POOL_BLOCKS = 40


class Instances:
    """Executors that hold one request's KV as a partition says, wired without managers. Instance 0 is its home."""

    def __init__(self, decoder, num_instances):
        network = InProcessNetwork(num_instances)
        self.sessions = {}
        self.executors = [
            Executor(
                decoder,
                nan_pool(decoder, POOL_BLOCKS),
                "torch",
                CooperativeTransport(network, rank, self.let_serve),
                lambda: 0.0,
                deadline_s=0.05,
            )
            for rank in range(num_instances)
        ]

    def let_serve(self, reader, creditor):
        if (creditor, reader) in self.sessions:
            number, serving, layers = self.sessions[creditor, reader]
            self.executors[creditor].answer(serving, reader, number, next(layers))

    def place(self, pool, partition, seed):
        """Copy sealed block p of `pool` to instance partition[p], the tail to the home. Returns each one's blocks."""
        draw, held = Random(seed), [[] for _ in self.executors]
        order = list(range(len(partition)))
        free = [draw.sample(range(POOL_BLOCKS), POOL_BLOCKS) for _ in self.executors]
        remote = [p for p in order if partition[p]]
        draw.shuffle(remote)  # the order within a loan does not matter
        for p in [p for p in order if not partition[p]] + remote:
            instance = partition[p]
            block = free[instance].pop()
            self.executors[instance].kv_pool[block] = pool[p]
            held[instance].append(block)
        held[0] += [free[0].pop() for _ in range(8)]  # the tail, and room for new tokens
        self.executors[0].kv_pool[held[0][partition.count(0)]] = pool[len(partition)]
        return held

    def start(self, ids, position, num_new, held):
        """A step of the home: `num_new` tokens from `position` on."""
        loans = {c: LoanId(0, 1, c, 1, 1, 0) for c in range(1, len(self.executors)) if held[c]}
        reads = {}
        for creditor, loan in loans.items():
            entry = ReadRow(num_new, ((loan, len(held[creditor])),))
            reads[creditor] = (creditor, list(range(num_new)))
            serving = self.executors[creditor].serve([entry], [held[creditor]])
            layers = iter(list(range(self.executors[0].decoder.config.num_layers)) * 2)
            self.sessions[creditor, 0] = (creditor, serving, layers)
        self.executors[0].accept(0, Text(list(ids), len(ids), 100))
        self.executors[0].start(
            1, 1, [StepRow(0, position, num_new, True, held[0], sum(len(held[c]) for c in loans))], reads
        )


def partitions():
    """(instances, instance of each sealed block)."""
    for seed in range(12):
        draw = Random(seed)
        count = draw.choice([2, 3, 4])
        yield count, [draw.randrange(count) for _ in range(draw.randrange(1, 20))]
    yield 2, [1] * 9  # all but the tail
    yield 4, [1, 2, 3] * 4
    yield 3, [2, 0, 1, 0, 2, 2, 0, 1]


@pytest.mark.parametrize("num_new", [1, 7])
@pytest.mark.parametrize(("num_instances", "partition"), list(partitions()))
def test_any_partition_gives_the_logits_of_one_instance(num_instances, partition, num_new):
    decoder, seed = tiny_decoder(), len(partition) * 31 + num_instances
    position = len(partition) * BLOCK_TOKENS + seed % BLOCK_TOKENS
    ids = random_ids(position + num_new, seed)
    pool, blocks = nan_pool(decoder, POOL_BLOCKS), list(range(POOL_BLOCKS))
    step(decoder, [Row(ids[:position], 0, blocks)], pool)
    instances = Instances(decoder, num_instances)
    held = instances.place(pool, partition, seed)
    expected = step(decoder, [Row(ids[position:], position, blocks)], pool)
    logits = []
    instances.executors[0].watch_logits = lambda req_id, line: logits.append(line)
    instances.start(ids, position, num_new, held)
    instances.executors[0].proceed([[]])
    torch.testing.assert_close(logits[0], expected[0], rtol=1e-5, atol=1e-5)


def test_a_creditor_that_does_not_answer_ends_the_iteration_by_its_deadline():
    decoder, ids = tiny_decoder(), random_ids(13, 0)
    pool = nan_pool(decoder, POOL_BLOCKS)
    step(decoder, [Row(ids[:12], 0, list(range(POOL_BLOCKS)))], pool)
    instances = Instances(decoder, 2)
    held = instances.place(pool, [0, 1, 0], 0)
    instances.start(ids, 12, 1, held)
    instances.sessions.clear()
    with pytest.raises(TransportError, match="nothing came"):
        instances.executors[0].proceed([[]])
    done = instances.executors[0].give_up()
    assert (done.num_iterations, done.ended, done.finished_ids) == (0, True, ())
    assert instances.executors[0].texts[0].new_ids == []


def test_two_instances_that_read_from_each_other_do_not_wait_for_ever(network):
    """Each serves from a thread of its own, apart from its own waits."""
    decoder, ids, blocks = tiny_decoder(), random_ids(21, 5), list(range(POOL_BLOCKS))
    pool = nan_pool(decoder, POOL_BLOCKS)
    step(decoder, [Row(ids[:20], 0, blocks)], pool)
    expected = step(decoder, [Row(ids[20:], 20, blocks)], pool.clone())

    def work(endpoint):
        """Ranks 0 and 1 decode, each with blocks 0–2 at the other; 2 and 3 are their serving threads."""
        if endpoint.rank >= 2:
            serving = Serving(pool, [1], [[0, 1, 2]])
            for layer in range(decoder.config.num_layers):
                query = Query(1, decoder.config.num_heads, decoder.config.head_dim, pool)
                reader = 3 - endpoint.rank
                endpoint.wait(endpoint.post_recv(reader, tag_of(QUERY, 1), query.message), time.monotonic() + 10)
                assert not query.has_ended
                answer = serving.answer(layer, query.q, decoder.config.scale, "torch")
                endpoint.send(reader, tag_of(ANSWER, 1), answer)
            return None
        own = pool.clone()
        batch = make_batch([Row(ids[20:], 20, [3, 4, 5], 9)], BLOCK_TOKENS)
        part = RemotePart(3 - endpoint.rank, 1, torch.tensor([0]))
        local = decoder.local_attention(batch, own, "torch")
        return decoder.forward(batch, DistAttention(local, [part], endpoint, time.monotonic, deadline_s=10.0))

    for logits in run_ranks(network(4), work)[:2]:
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
