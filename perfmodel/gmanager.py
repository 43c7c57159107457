"""GManager: the cluster-wide planner. Owns a view, built from heartbeats, and orders, which are advice.

It holds no truth: every order may be refused by the instance that owns the blocks. Two paths: the *throughput* path asks the
placement policy once a period; the *capacity* path grants room for whole prompts, first come first served, one order at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from perfmodel.cost import CostModel
from perfmodel.loan import CLOCK_DRIFT
from perfmodel.messages import (
    Address,
    Command,
    Event,
    Heartbeat,
    HeartbeatReply,
    MessageReceived,
    MoveKvCache,
    Need,
    OrderId,
    PeerLost,
    PeerReturned,
    Preempt,
    RequestPlacementEntry,
    Send,
    TimerFired,
)
from perfmodel.specs import LinkSpec
from perfmodel.view import ClusterView, Load, Move, PlacementPolicy, SchedulerParams

DEAD_AFTER_HEARTBEATS = 7.0  # periods of silence before one counts as dead: who rests may lose a heartbeat
MIN_TURN_BLOCKS, MAX_TURNS = 16, 32  # of a creditor, where a prompt's blocks go to several in turn


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What a gManager knows of the cluster before any heartbeat."""

    num_instances: int
    block_tokens: int
    belief: CostModel
    link: Callable[[int, int], LinkSpec]


@dataclass(slots=True)
class _Instance:
    """The newest heartbeat of one instance."""

    incarnation: int
    seq: int
    heard_s: float
    load: Load
    open_order: OrderId | None
    youngest: tuple[int, int] | None
    placement: dict[tuple[int, int], RequestPlacementEntry] = field(default_factory=dict)
    complete: bool = False  # a full heartbeat has been heard under this gManager's incarnation


class GManager:
    """One per cluster. `incarnation` grows with each restart; orders of older ones are refused by whoever has heard of it."""

    def __init__(
        self,
        facts: ClusterFacts,
        params: SchedulerParams,
        placement: PlacementPolicy,
        incarnation: int = 1,
        now_s: float = 0.0,
    ) -> None:
        self.facts, self.params, self.placement, self.incarnation = facts, params, placement, incarnation
        self.instances: dict[int, _Instance] = {}
        self._needy: dict[int, tuple[Need, ...]] = {}  # needs of the instances that have any
        self._incarnations: tuple[tuple[int, int], ...] | None = None  # cached; None where one has come or gone
        self._plan_at_s = now_s + params.period_s
        self._orders = 0
        self._granting: tuple[OrderId, int, float] | None = (
            None  # the capacity order in flight: id, request, forgotten at
        )
        self._needs_since_s: dict[int, float] = {}  # request → since when its need is known
        self._settled_at_s = now_s + DEAD_AFTER_HEARTBEATS * params.heartbeat_s

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case MessageReceived(sender, Heartbeat() as heartbeat):
                return self._on_heartbeat(sender, heartbeat, now_s)
            case PeerLost(peer):
                self._forget(peer, now_s)
                return []
            case PeerReturned():
                return []
            case TimerFired():
                self._plan_at_s = now_s + self.params.period_s
                return self._plan(now_s)
        raise AssertionError(f"the gManager does not know {event}")

    def next_deadline_s(self) -> float:
        return self._plan_at_s

    def check_invariants(self) -> None:
        assert all(entry.num_blocks > 0 for known in self.instances.values() for entry in known.placement.values())

    # ---- heartbeats ----------------------------------------------------------------------------------------------------------
    def _on_heartbeat(self, sender: Address, heartbeat: Heartbeat, now_s: float) -> list[Command]:
        known = self.instances.get(sender)
        if known is not None and (heartbeat.incarnation, heartbeat.seq) <= (known.incarnation, known.seq):
            return []
        fresh = known is None or known.incarnation != heartbeat.incarnation
        complete = heartbeat.full or (not fresh and known is not None and known.complete)
        placement = {} if heartbeat.full or fresh or known is None else known.placement
        if fresh:
            self._incarnations = None
        for entry in heartbeat.entries:
            key = (entry.req_id, entry.inst_id)
            if entry.num_blocks:
                placement[key] = entry
            else:
                placement.pop(key, None)
        self.instances[sender] = _Instance(
            heartbeat.incarnation,
            heartbeat.seq,
            now_s,
            heartbeat.load,
            heartbeat.open_order,
            heartbeat.youngest,
            placement,
            complete,
        )
        self._note_outcomes(heartbeat)
        self._note_needs(sender, heartbeat.needs, now_s)
        commands: list[Command] = [Send(sender, self._reply(heartbeat, now_s, resync=not complete))]
        if heartbeat.needs and self._knows_all(now_s):
            commands += self._plan_capacity(now_s)
        return commands

    def _note_outcomes(self, heartbeat: Heartbeat) -> None:
        if self._granting is not None and any(order == self._granting[0] for order, _ in heartbeat.outcomes):
            self._granting = None

    def _note_needs(self, instance: int, needs: tuple[Need, ...], now_s: float) -> None:
        if needs:
            self._needy[instance] = needs
        elif self._needy.pop(instance, None) is None:
            return
        open_ids = [need.req_id for need, _ in self._needs()]
        self._needs_since_s = {req_id: self._needs_since_s.get(req_id, now_s) for req_id in open_ids}

    def _needs(self) -> list[tuple[Need, int]]:
        """All needs, and whose they are."""
        return [(need, instance) for instance, needs in self._needy.items() for need in needs]

    def _is_pressing(self, need: Need, now_s: float) -> bool:
        """A need that has waited for a lease: until then it gets the room that comes free anyway."""
        return now_s - self._needs_since_s.get(need.req_id, now_s) >= self.params.lease_s

    def _reply(self, heartbeat: Heartbeat, now_s: float, resync: bool) -> HeartbeatReply:
        if self._incarnations is None:
            self._incarnations = tuple((i, known.incarnation) for i, known in sorted(self.instances.items()))
        return HeartbeatReply(
            self.incarnation, heartbeat.seq, self._incarnations, resync, self._barrier(now_s), not self._needy
        )

    def _barrier(self, now_s: float) -> int | None:
        """Sequence of the oldest pressing need: nobody behind it is admitted anywhere."""
        return min((need.sequence for need, _ in self._needs() if self._is_pressing(need, now_s)), default=None)

    # ---- planning ------------------------------------------------------------------------------------------------------------
    def _plan(self, now_s: float) -> list[Command]:
        silent_s = DEAD_AFTER_HEARTBEATS * self.params.heartbeat_s
        for instance, known in list(self.instances.items()):
            if now_s - known.heard_s > silent_s:
                self._forget(instance, now_s)
        if not self._knows_all(now_s):
            return []
        commands = self._plan_capacity(now_s)
        return commands + [self._order(move) for move in self.placement.plan(self.view()) if self._is_known(move)]

    def _knows_all(self, now_s: float) -> bool:
        """A (re)started gManager plans after a full heartbeat of every live instance; the silent ones it takes for dead."""
        heard = len(self.instances) == self.facts.num_instances or now_s >= self._settled_at_s
        return heard and all(known.complete for known in self.instances.values())

    def _forget(self, instance: int, now_s: float) -> None:
        self.instances.pop(instance, None)
        self._note_needs(instance, (), now_s)
        self._incarnations = None

    def view(self) -> ClusterView:
        """What the placement policy sees now."""
        loads = {i: known.load for i, known in sorted(self.instances.items())}
        kept = sum(need.num_blocks for need, _ in self._needs())
        return ClusterView(loads, self.facts.belief, self.params, self.facts.block_tokens, self.facts.link, kept)

    def _is_known(self, move: Move) -> bool:
        return (
            move.src in self.instances and move.dst in self.instances and move.src != move.dst and move.num_blocks > 0
        )

    def _order(self, move: Move) -> Command:
        part = (move.dst, self.instances[move.dst].incarnation, move.num_blocks)
        return self._send_order(move.src, move.req_id, (part,), "throughput")

    def _send_order(self, debtor: int, req_id: int, parts: tuple[tuple[int, int, int], ...], kind: str) -> Command:
        order = self._next_order()
        return Send(debtor, MoveKvCache(order, self.instances[debtor].seq, req_id, parts, kind))

    def _next_order(self) -> OrderId:
        self._orders += 1
        return OrderId(self.incarnation, self._orders)

    # ---- capacity ------------------------------------------------------------------------------------------------------------
    def _plan_capacity(self, now_s: float) -> list[Command]:
        """Grant the oldest need, or make room for it; one order in flight."""
        if self._granting is not None and now_s < self._granting[2]:
            return []
        self._granting = None
        needs = self._needs()
        if not needs or any(known.open_order for known in self.instances.values()):
            return []
        need, debtor = min(needs, key=lambda n: n[0].sequence)
        parts = self._parts(need, debtor)
        if not parts:
            return self._make_room(need) if self._is_pressing(need, now_s) else []
        command = self._send_order(debtor, need.req_id, parts, "capacity")
        for creditor, _, count in parts:  # promised, until its next heartbeat says more
            known = self.instances[creditor]
            known.load = known.load._replace(free_blocks=known.load.free_blocks - count)
        ttl_s = self.params.order_ttl_s * (1 + 2 * CLOCK_DRIFT)
        self._granting = (OrderId(self.incarnation, self._orders), need.req_id, now_s + ttl_s)
        return [command]

    def _parts(self, need: Need, debtor: int) -> tuple[tuple[int, int, int], ...]:
        """Who takes how much, in the order of positions, each up to its headroom; nothing where they have not enough together.

        A prompt goes to near instances that are idle first, in equal shares and turns, so that all of them compute at every
        time, the home taking part with what it need not place elsewhere, less its headroom, since the request will grow. Then
        come near ones that run requests, then far ones, as few of them as can be: the requests there are held up, and each far
        one costs the slower link a query more.
        """
        loads = {i: known.load for i, known in self.instances.items()}
        rooms = {i: load.room_blocks for i, load in loads.items() if i != debtor}
        room = sum(rooms.values())
        left = min(need.num_blocks, room) if need.grows else need.num_blocks
        if not 0 < left <= room:
            return ()
        speed = {i: self.facts.link(debtor, i).bytes_per_s for i in rooms}
        near = [i for i in rooms if speed[i] == max(speed.values())]
        idle: dict[int, int] = {}
        if not need.grows:
            kept = min(loads[debtor].headroom_blocks, need.more_blocks, room - left)
            left += kept
            at_home = {debtor: need.more_blocks - kept}
            idle = share_evenly(at_home | {i: rooms[i] for i in near if loads[i].idle}, left + at_home[debtor])
            idle.pop(debtor, None)
        parts = deal(idle)
        left -= sum(idle.values())
        for tier in (set(near) - set(idle), set(rooms) - set(near)):
            few = fill({i: rooms[i] for i in tier}, left)
            parts += few.items()
            left -= sum(few.values())
        return tuple((i, self.instances[i].incarnation, n) for i, n in parts)

    def _make_room(self, need: Need) -> list[Command]:
        """An unmet need older than the youngest admitted request: preempt that one."""
        youngest = [(*known.youngest, i) for i, known in self.instances.items() if known.youngest is not None]
        if not youngest:
            return []
        sequence, req_id, instance = max(youngest)
        if sequence <= need.sequence:
            return []
        known = self.instances[instance]
        known.youngest = None  # the next one shows up in the next heartbeat
        return [Send(instance, Preempt(self._next_order(), known.seq, req_id))]


def share_evenly(rooms: dict[int, int], wanted: int) -> dict[int, int]:
    """`wanted` blocks, or as many as there is room for, in shares as equal as the rooms allow."""
    shares = {}
    for left, i in zip(range(len(rooms), 0, -1), sorted(rooms, key=lambda i: (rooms[i], i)), strict=True):
        shares[i] = min(rooms[i], -(-wanted // left))
        wanted -= shares[i]
    return {i: n for i, n in sorted(shares.items()) if n}


def fill(rooms: dict[int, int], wanted: int) -> dict[int, int]:
    """`wanted` blocks from as few instances as can be: the largest rooms first."""
    shares = {}
    for i in sorted(rooms, key=lambda i: (-rooms[i], i)):
        shares[i] = min(rooms[i], max(0, wanted))
        wanted -= shares[i]
    return {i: n for i, n in shares.items() if n}


def deal(shares: dict[int, int]) -> list[tuple[int, int]]:
    """Shares handed out in turns of equal size."""
    left, turns = dict(shares), []
    hand = max(MIN_TURN_BLOCKS, max(shares.values(), default=0) // MAX_TURNS)
    while left:
        turns += [(i, min(hand, n)) for i, n in left.items()]
        left = {i: n - hand for i, n in left.items() if n > hand}
    return turns
