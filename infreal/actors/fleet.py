"""What is needed to make a host anywhere, and what the head asks of those who run them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from infreal.actors.host import Host, Post
from infreal.actors.mail import Page
from perfmodel.cluster import ClusterSpec, build_dispatcher, build_gmanager, build_rmanager
from perfmodel.messages import DISPATCHER, GMANAGER, Address

if TYPE_CHECKING:
    from infreal.actors.instance import Instance
    from infreal.executor import Executor
    from infreal.model import Decoder
    from infreal.requests import Requests
    from infreal.transport import Transport

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
class Work:
    """What an instance needs besides. make_transport(rank): its end of the data plane · pinned: to one core of its node ·
    prepare(instance): called before it starts (tests)."""

    make_decoder: "Callable[[], Decoder]"
    requests: "Requests"
    make_transport: "Callable[[int], Transport]"
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
    """A place for a host: holds what takes long to make, so that the host itself can begin at once. work: of an instance."""

    def __init__(self, address: Address, setup: Setup, work: Work | None, now_s: Clock) -> None:
        self.setup, self.work, self.now_s, self.spec = setup, work, now_s, setup.make_spec()
        self.executor = None if work is None else self._make_executor(address, work)

    def _make_executor(self, rank: int, work: Work) -> "Executor":
        from infreal.executor import Executor  # coordinators need no torch

        decoder = work.make_decoder()
        pool = decoder.new_pool(self.spec.num_blocks, self.spec.instance.block_tokens)
        return Executor(decoder, pool, work.backend, work.make_transport(rank), self.now_s, self.setup.deadline_s)

    def make_host(self, birth: Birth, post: Post) -> "Host | Instance":
        """A host that is not started yet."""
        spec, options = self.spec, {"full": self.setup.full, "check": self.setup.check}
        if birth.address == DISPATCHER:
            return Host(DISPATCHER, build_dispatcher(spec), self.now_s, post, **options)
        if birth.address == GMANAGER:
            gmanager = build_gmanager(spec, birth.incarnation, birth.now_s)
            return Host(GMANAGER, gmanager, self.now_s, post, **options)
        from infreal.actors.instance import Instance

        assert self.executor is not None and self.work is not None, "an instance has an executor"
        if birth.incarnation > 1:
            for peer in set(range(spec.num_instances)) - {birth.address}:
                self.executor.transport.reset(peer)
        machine = build_rmanager(spec, birth.address, birth.incarnation, birth.now_s)
        instance = Instance(
            machine, self.work.requests, self.executor, post, incarnations=dict(birth.others), **options
        )
        if self.work.prepare is not None:
            self.work.prepare(instance)
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
    """Runs the hosts of a run: in threads, or as actors."""

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


PAGE_S = 0.2
