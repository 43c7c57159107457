"""Runs on actors without Ray: every host in threads of this process, one mailman for each, a data plane of the same process."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from pool_tools import Prompts, poison_free_blocks, reference, tiny_decoder
from torch.distributed import HashStore

from infreal.actors.fleet import PAGE_S, Collected, Died, Nest, Ready, Seat, Setup, Work
from infreal.actors.head import Head
from infreal.requests import Requests
from infreal.transport.group import join_group
from infreal.transport.in_process import InProcessNetwork, InProcessTransport


class ThreadNet:
    """The data planes of a run in this process."""

    def __init__(self, num_instances, num_ranks=1):
        self.num_ranks = num_ranks
        self._pairs = [InProcessNetwork(num_instances) for _ in range(num_ranks)]
        self._controls, self._stores, self._groups, self._lock = {}, {}, {}, Lock()

    def pairs(self, seat):
        network = self._pairs[seat.rank]
        network.lost.discard(seat.address)
        return InProcessTransport(network, seat.address)

    def control(self, seat):
        with self._lock:
            network = self._controls.setdefault((seat.address, seat.life), InProcessNetwork(self.num_ranks))
        return network.endpoints[seat.rank]

    def group(self, seat, timeout_s):
        with self._lock:
            store = self._stores.setdefault((seat.address, seat.life), HashStore())
        group = self._groups[seat] = join_group(store, seat.rank, self.num_ranks, timeout_s, host="127.0.0.1")
        return group

    def kill(self, seat):
        self._pairs[seat.rank].kill(seat.address)
        if self.num_ranks > 1:
            self._controls[seat.address, seat.life].kill(seat.rank)
            self._groups[seat].close()


class ThreadFleet:
    """A fleet in this process. `hosts`: those that live; `followers`: their other ranks."""

    def __init__(self, setup, work):
        self.setup, self.work, self.net, self.hosts, self.followers = setup, work, work.net, {}, {}
        self._nests, self._news, self._mail, self._zero_s, self._lives = {}, SimpleQueue(), {}, None, Counter()
        self.watch = None  # (receiver, item): called before an item is posted

    def now_s(self):
        return 0.0 if self._zero_s is None else time.monotonic() - self._zero_s

    def make(self, address):
        self._lives[address] += 1
        work, num_ranks = (self.work, self.work.num_ranks) if address >= 0 else (None, 1)
        seats = [Seat(address, rank, self._lives[address]) for rank in range(num_ranks)]
        with ThreadPoolExecutor(num_ranks) as pool:  # they meet
            self._nests[address] = list(pool.map(lambda seat: Nest(seat, self.setup, work, self.now_s), seats))
        self._news.put((address, Ready()))

    def begin(self, births):
        self._zero_s = self._zero_s or time.monotonic()
        for birth in births:
            host, *followers = [nest.make_host(birth, self.post) for nest in self._nests[birth.address]]
            self.hosts[birth.address], self.followers[birth.address] = host, followers
            if birth.address >= 0:
                pools = [nest.executor.kv_pool for nest in self._nests[birth.address]]
                poison_free_blocks(host.machine, *pools)
            self._mail[birth.address] = SimpleQueue()
        for birth in births:
            host = self.hosts[birth.address]
            for one in (host, *self.followers[birth.address]):
                one.start()
            for work in (self._carry, self._collect):
                Thread(target=work, args=(birth.address, host), daemon=True).start()

    def post(self, receiver, item):
        if self.watch:
            self.watch(receiver, item)
        if receiver in self.hosts:
            self._mail[receiver].put(item)

    def _carry(self, address, host):
        mail = self._mail[address]
        while (item := mail.get()) is not None:
            if self.hosts.get(address) is host:
                host.deliver(item)

    def _collect(self, address, host):
        while self.hosts.get(address) is host:
            asked_s = self.now_s()
            page = host.host.collect(PAGE_S)
            if self.hosts.get(address) is host:
                self._news.put((address, Collected(page, asked_s)))

    def news(self, timeout_s):
        found = []
        with suppress(Empty):
            found.append(self._news.get(timeout=timeout_s))
            while True:
                found.append(self._news.get_nowait())
        return found

    def kill(self, address):
        host = self.hosts.pop(address, None)
        if host is not None:
            host.host.close()
            self._mail[address].put(None)
            for nest in self._nests[address] if address >= 0 else ():
                self.net.kill(nest.seat)

    def die(self, address):
        """As of a fault: nobody has asked for it."""
        if address in self.hosts:
            self.kill(address)
            self._news.put((address, Died("killed by the test")))

    def lose_rank(self, address, rank):
        """As of a fault: the others find out by themselves."""
        self.net.kill(self._nests[address][rank].seat)

    def close(self):
        for address in list(self.hosts):
            self.kill(address)


def poison(instance):
    poison_free_blocks(instance.machine, instance.executor.kv_pool)


@dataclass
class ActorRun:
    """A run in threads, with invariants checked and NaN in every free block."""

    spec: object
    load: object
    decoder: object = field(default_factory=tiny_decoder)
    make_decoder: object = None  # of a rank, by its group; None: all have the same
    observer: object = None
    deadline_s: float = 20.0

    def __post_init__(self):
        self.prompts = Prompts(self.load, self.decoder.config.vocab_size)
        requests = Requests(self.load, self.prompts)
        net = ThreadNet(self.spec.num_instances, self.spec.instance.tensor_parallel)
        setup = Setup(lambda: self.spec, self.deadline_s, full=self.observer is not None, check=True)
        work = Work(self.make_decoder or (lambda group: self.decoder), requests, net, net.num_ranks)
        self.fleet = ThreadFleet(setup, work)
        self.head = Head(self.spec, requests, self.fleet, self.observer, self.deadline_s)
        self.machines = []

    def at(self, time_s, what, *args):
        self.head._at(time_s, partial(what, self, *args))

    def finish(self):
        close = self.fleet.close

        def keep_and_close():
            self.machines = [host.machine for address, host in self.fleet.hosts.items() if address >= 0]
            close()

        self.fleet.close = keep_and_close
        self.result = self.head.run()
        return self

    def count(self, kind, outcome="committed"):
        moves = self.result.moves
        return list(zip(moves["kind"], moves["outcome"], strict=True)).count((kind, outcome))

    def assert_exact(self):
        assert set(self.result.requests["status"]) == {"finished"}, self.result.requests["reason"]
        for req_id in range(len(self.load)):
            expected = reference(self.decoder, self.prompts(req_id), int(self.load.output_tokens[req_id]))[0]
            assert self.head.outputs[req_id] == expected, f"request {req_id}"
        for machine in self.machines:
            assert machine.pool.free == self.spec.num_blocks
