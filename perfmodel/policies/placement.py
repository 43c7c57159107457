"""Simple placement policies: `reactive` moves only when memory has run out, `none` never does."""

from collections import deque
from collections.abc import Iterable, Sequence

from perfmodel.policies.draft import Draft
from perfmodel.view import ClusterView, Load, Movable, Move, prompt_blocks

Rooms = Iterable[tuple[int, int]]  # (blocks, creditor)


class NoPlacement:
    """Every request stays where it is."""

    def plan(self, view: ClusterView) -> Sequence[Move]:
        return ()


class Reactive:
    """Where the first waiting prompt of an instance does not fit, just enough blocks of its longest requests go to the
    instances with the most room: all that is missing, or nothing. It asks no model what that costs. An instance that lacks room
    itself takes nothing."""

    def plan(self, view: ClusterView) -> Sequence[Move]:
        draft = Draft(view)
        short = {i: n for i, load in sorted(view.loads.items()) if (n := shortage_blocks(load, view.block_tokens)) > 0}
        for instance, num_blocks in short.items():
            rooms = [(draft.room_blocks(i), i) for i in view.loads if i not in short]
            if num_blocks <= draft.spare_blocks:
                for move in plan_relief(instance, view.loads[instance].longest, num_blocks, rooms):
                    draft.order(move)
        return draft.moves


def shortage_blocks(load: Load, block_tokens: int) -> int:
    """Blocks that the first waiting prompt lacks (0 or less: it fits, or none waits)."""
    if not load.waiting:
        return 0
    room = load.free_blocks + load.pledged_blocks - load.kept_blocks
    return prompt_blocks(load.waiting[0], block_tokens) - room


def plan_relief(instance: int, requests: Iterable[Movable], num_blocks: int, rooms: Rooms) -> list[Move]:
    """Moves that free `num_blocks` blocks here, or none. Longest request first, to the most room first (then by id)."""
    creditors = deque(sorted(((n, i) for n, i in rooms if n), key=lambda room: (-room[0], room[1])))
    moves: list[Move] = []
    for request in requests:
        left = request.movable_blocks
        while left and num_blocks and creditors:
            room, creditor = creditors.popleft()
            n = min(left, num_blocks, room)
            moves.append(Move(request.req_id, instance, creditor, n))
            left, num_blocks = left - n, num_blocks - n
            if room > n:
                creditors.appendleft((room - n, creditor))
    return [] if num_blocks else moves
