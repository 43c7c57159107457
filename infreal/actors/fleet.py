"""What is needed to make a host anywhere, and what the head asks of those who run them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from infreal.actors.host import Host, Post
from infreal.actors.mail import Page
from perfmodel.cluster import ClusterSpec, build_dispatcher, build_gmanager, build_rmanager
from perfmodel.messages import DISPATCHER, GMANAGER, Address

if TYPE_CHECKING:
    from infreal.actors.channel import Channel
    from infreal.actors.follower import Follower
    from infreal.actors.instance import Instance
    from infreal.executor import Executor
    from infreal.model import Decoder
    from infreal.requests import Requests
    from infreal.transport import Transport
    from infreal.transport.group import Group

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Setup:
    """A run, as any host is told of it: things are made there by calling them.

    deadline_s: longest wait for a peer, and for a host's diary · full: diaries keep every event · check: verify invariants after
    every event (tests).
    """

    make_spec: Callable[[], ClusterSpec]
    deadline_s: float = 10.0
    full: bool = False
    check: bool = False


@dataclass(frozen=True, slots=True)
class Seat:
    """Whose place it is: a host's, or that of one rank of an instance. life: how often the address has been made by now."""

    address: Address
    rank: int = 0
    life: int = 1


class Net(Protocol):
    """The data planes of a run, for whoever sits where."""

    def pairs(self, seat: Seat) -> "Transport":
        """Its end of the pairs of instances: the same rank of each, a rank of the transport is an instance."""

    def control(self, seat: Seat) -> "Transport":
        """Its end between the ranks of its instance, in this life: for orders."""

    def group(self, seat: Seat, timeout_s: float) -> "Group":
        """Its end of the group of these ranks: for their model. Raises GroupLost."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an instance needs besides. make_decoder(group): the part of one rank · num_ranks: of it · pinned: to one core of its
    node, each rank · prepare(instance): called before it starts (tests)."""

    make_decoder: "Callable[[Group], Decoder]"
    requests: "Requests"
    net: Net
    num_ranks: int = 1
    backend: str = "torch"
    pinned: bool = False
    prepare: "Callable[[Instance], None] | None" = None


@dataclass(frozen=True, slots=True)
class Birth:
    """A machine begins: under this incarnation, at this time of the run. others: incarnations of those that are there."""

    address: Address
    incarnation: int = 1
    now_s: float = 0.0
    others: tuple[tuple[Address, int], ...] = ()


class Nest:
    """A place for a host, or a follower of one: holds what takes long to make, so that it can begin at once. work: of an
    instance."""

    def __init__(self, seat: Seat, setup: Setup, work: Work | None, now_s: Clock) -> None:
        self.seat, self.setup, self.work, self.now_s, self.spec = seat, setup, work, now_s, setup.make_spec()
        self.executor = None if work is None else self._make_executor(work)
        self.channel = None if work is None or work.num_ranks == 1 else self._make_channel(work)

    def _make_executor(self, work: Work) -> "Executor":
        from infreal.actors.rank import PATIENCE  # coordinators need no torch
        from infreal.executor import Executor

        deadline_s = self.setup.deadline_s
        decoder = work.make_decoder(work.net.group(self.seat, PATIENCE * deadline_s))
        pool = decoder.new_pool(self.spec.num_blocks, self.spec.instance.block_tokens)
        pairs = work.net.pairs(self.seat)
        executor = Executor(decoder, pool, work.backend, pairs, self.now_s, deadline_s)
        executor.warm_up()  # all ranks together
        return executor

    def _make_channel(self, work: Work) -> "Channel":
        from infreal.actors.channel import Channel

        return Channel(work.net.control(self.seat))

    def make_host(self, birth: Birth, post: Post) -> "Host | Instance | Follower":
        """A host that is not started yet."""
        spec, options = self.spec, {"full": self.setup.full, "check": self.setup.check}
        if birth.address == DISPATCHER:
            return Host(DISPATCHER, build_dispatcher(spec), self.now_s, post, **options)
        if birth.address == GMANAGER:
            gmanager = build_gmanager(spec, birth.incarnation, birth.now_s)
            return Host(GMANAGER, gmanager, self.now_s, post, **options)
        from infreal.actors.follower import Follower
        from infreal.actors.instance import Instance

        work, executor, channel = self.work, self.executor, self.channel
        assert executor is not None and work is not None, "an instance has an executor"
        if birth.incarnation > 1:
            for peer in set(range(spec.num_instances)) - {birth.address}:
                executor.transport.reset(peer)
        if self.seat.rank:
            assert channel is not None, "ranks that are several have a channel"
            return Follower(executor, work.requests, channel)
        machine = build_rmanager(spec, birth.address, birth.incarnation, birth.now_s)
        ranks = {"channel": channel, "num_ranks": work.num_ranks, "incarnations": dict(birth.others)}
        instance = Instance(machine, work.requests, executor, post, **ranks, **options)
        if work.prepare is not None:
            work.prepare(instance)
        return instance


@dataclass(frozen=True, slots=True)
class Ready:
    """A host that was asked for can begin."""


@dataclass(frozen=True, slots=True)
class Died:
    """A host is gone."""

    why: str


@dataclass(frozen=True, slots=True)
class Collected:
    """A page of a diary, asked for at `asked_s`."""

    page: Page
    asked_s: float


News = Ready | Died | Collected


class Fleet(Protocol):
    """Runs the hosts of a run: in threads, or as actors. All ranks of an instance are one host to those who use a fleet."""

    def now_s(self) -> float:
        """Time of the run, the same for all hosts; 0 until `set_off`."""

    def make(self, address: Address) -> None:
        """Have a host made; `Ready` will come. Replaces one that died."""

    def begin(self, births: list[Birth]) -> None:
        """Hosts that are ready begin, and know all others that have begun. The first call starts the time."""

    def post(self, receiver: Address, item: Any) -> None:
        """Deliver an item, in order; to one that is gone: nowhere."""

    def news(self, timeout_s: float) -> list[tuple[Address, News]]:
        """What is new, as soon as there is something. Pages come at least every `PAGE_S`."""

    def kill(self, address: Address) -> None:
        """End a host at once, whatever it is doing. No `Died` follows."""

    def close(self) -> None:
        """End all hosts, and leave nothing running."""


PAGE_S = 0.5
