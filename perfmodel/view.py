"""What the gManager knows of the cluster, and what a placement policy may see: built from heartbeats, possibly stale."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from perfmodel.cost import CostModel
from perfmodel.specs import LinkSpec


@dataclass(frozen=True, slots=True)
class SchedulerParams:
    """The keys of `scheduler:` in a configuration, with the same names and defaults."""

    batch_threshold: int = 64  # a debtor decodes at most this many rows (β_thres)
    memory_threshold_frac: float = 0.8  # a creditor uses at most this share of its blocks (U_thres)
    period_s: float = 1.0
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    renew_s: float = 2.0
    order_ttl_s: float = 3.0
    lent_cap_frac: float = 0.5
    move_tokens_per_iteration: int = (
        256  # about what half a 100 Gb/s link carries in 20 ms; the paper's link carried 16
    )


class Movable(NamedTuple):
    """A request of an instance. movable_blocks: sealed, local, unpledged ones. context_tokens: all its KV, wherever it is."""

    req_id: int
    context_tokens: int
    movable_blocks: int


class RemoteRead(NamedTuple):
    """Decode rows that read KV on another instance: `tokens` KV tokens there, summed over `rows` rows."""

    peer: int
    rows: int
    tokens: int

    def one_more_row(self, tokens: int, debtor_rows: int) -> "RemoteRead":
        """With `tokens` tokens of a row that is counted already only where all `debtor_rows` rows are."""
        return RemoteRead(self.peer, max(self.rows, min(self.rows + 1, debtor_rows)), self.tokens + tokens)


def read_of(reads: Iterable[RemoteRead], peer: int) -> RemoteRead:
    """The read of (or by) one peer, of no rows where there is none."""
    return next((read for read in reads if read.peer == peer), RemoteRead(peer, 0, 0))


class Load(NamedTuple):
    """State of an instance as its heartbeat tells it.

    free_blocks does not contain pledged ones (local, promised to a move in progress, free once it commits); lent_blocks: lent
    and reserved; context_tokens: tokens its decode batch reads locally in one iteration; remote: what it reads elsewhere;
    served: what others read here; waiting: tokens to compute of the first waiting prompts, in order; longest: its longest
    requests, longest first; iteration_s: duration of its last iteration (0: none yet).
    """

    total_blocks: int
    free_blocks: int
    pledged_blocks: int
    lent_blocks: int
    headroom_blocks: int
    batch: int
    context_tokens: int
    remote: tuple[RemoteRead, ...]
    served: tuple[RemoteRead, ...]
    waiting: tuple[int, ...]
    longest: tuple[Movable, ...]
    iteration_s: float

    @property
    def idle(self) -> bool:
        """Runs no request."""
        return not self.batch and not self.longest

    @property
    def used_frac(self) -> float:
        """Memory utilisation of Algorithm 1. Pledged blocks count as used: they are here until their move has committed."""
        return 1 - self.free_blocks / self.total_blocks

    @property
    def room_blocks(self) -> int:
        """Free blocks beyond the headroom."""
        return max(0, self.free_blocks - self.headroom_blocks)

    @property
    def kept_blocks(self) -> int:
        """Blocks kept back from the next prompt: the headroom, except that an idle instance takes any prompt that fits."""
        return 0 if self.idle else self.headroom_blocks


@dataclass(frozen=True, slots=True)
class ClusterView:
    """loads: by instance, only those alive. link(a, b): the link between two instances. room_kept_blocks: blocks that a waiting
    capacity order needs; throughput plans leave them free."""

    loads: dict[int, Load]
    belief: CostModel
    params: SchedulerParams
    block_tokens: int
    link: Callable[[int, int], LinkSpec]
    room_kept_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """Lend `num_blocks` sealed blocks of a request, from its instance `src` to `dst`."""

    req_id: int
    src: int
    dst: int
    num_blocks: int


def prompt_blocks(tokens: int, block_tokens: int) -> int:
    """Blocks that admit a prompt: for its tokens and the next one."""
    return tokens // block_tokens + 1


class PlacementPolicy(Protocol):
    """Decides which KV to place elsewhere; asked once a scheduler period."""

    def plan(self, view: ClusterView) -> Sequence[Move]: ...
