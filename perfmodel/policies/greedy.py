"""Algorithm 1 (paper.md §5): a debtor lends blocks of its longest request where that adds most tokens per second.

What the paper leaves open, and our choice:

- debtors: batch ≤ batch_threshold, ascending, then by id; those without a request that has blocks to move are skipped;
- creditors: used share of memory ≤ memory_threshold_frac, ascending, then by id. Pledged blocks count as used at their debtor
  (they are there until the move has committed), reserved ones at the creditor;
- r: the longest request that has blocks to move (sealed, here, not pledged);
- block_max: blocks of r, the creditor's room (free less headroom, lent cap, what a capacity order keeps), and the cap that
  keeps the remote work hidden. A creditor that can take no block is passed over; the first whose best k is 0 ends the debtor's
  turn;
- nothing is ordered that is not moved within a period at the pace of `move_tokens_per_iteration`: until a move has committed
  its blocks are held at both ends;
- after an order the view is updated and the creditor sorted in anew. It is asked once by each debtor.
"""

from bisect import insort
from collections.abc import Sequence

from perfmodel.gain import Pricer
from perfmodel.policies.draft import Draft
from perfmodel.view import ClusterView, Load, Movable, Move

Queue = list[tuple[float, int]]  # creditors by used share of memory, then by id


class Greedy:
    """Algorithm 1, with the gain of perfmodel.gain."""

    def plan(self, view: ClusterView) -> Sequence[Move]:
        draft = Draft(view)
        pricer = Pricer(view, draft.loads)
        threshold = view.params.memory_threshold_frac
        queue = sorted((load.used_frac, i) for i, load in view.loads.items() if load.used_frac <= threshold)
        for debtor in plan_debtors(view):
            lend(debtor, queue, draft, pricer, threshold)
        return draft.moves


def plan_debtors(view: ClusterView) -> list[int]:
    """Who may lend, smallest batch first."""
    batches = [
        (load.batch, i)
        for i, load in view.loads.items()
        if load.batch <= view.params.batch_threshold and _longest(load) is not None
    ]
    return [i for _, i in sorted(batches)]


def lend(debtor: int, queue: Queue, draft: Draft, pricer: Pricer, threshold: float) -> None:
    """A debtor's turn: order moves of its longest request, from the least used creditor on, while they gain."""
    request = _longest(draft.loads[debtor])
    assert request is not None, "debtors have blocks to move, and nobody else moves them"
    left, position, spare_s = min(request.movable_blocks, draft.pace_blocks(debtor)), 0, pricer.spare_s(debtor)
    asked = {debtor}
    while left and position < len(queue) and spare_s >= pricer.least_residual_s:
        creditor = queue[position][1]
        position += 1
        if creditor in asked or not pricer.can_hide(debtor, creditor, spare_s):
            continue
        asked.add(creditor)
        reads = pricer.reads(debtor, creditor)
        block_max = pricer.hidden_blocks(debtor, reads[1], min(left, draft.room_blocks(creditor)))
        if not block_max:
            continue
        num_blocks = pricer.pair(debtor, creditor, reads).best(block_max).num_blocks
        if not num_blocks:
            return
        draft.order(Move(request.req_id, debtor, creditor, num_blocks))
        left, spare_s = left - num_blocks, pricer.spare_s(debtor)
        position -= 1  # it leaves its place …
        del queue[position]
        used_frac = draft.loads[creditor].used_frac
        if used_frac <= threshold:
            insort(queue, (used_frac, creditor))  # … for one further on


def _longest(load: Load) -> Movable | None:
    return next((request for request in load.longest if request.movable_blocks), None)
