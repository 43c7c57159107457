"""Policies of the figures' own sweeps, in the form that any user's policy has (see perfmodel.policies)."""

from collections.abc import Sequence

from perfmodel.dispatcher import DispatchView
from perfmodel.messages import Request
from perfmodel.policies.draft import Draft
from perfmodel.view import ClusterView, Move

LONG_TOKENS = 50_000


class LendToCap:
    """Instance 0 lends out blocks of its longest request as far as the cap allows (scheduler.lent_cap_frac), asking no model:
    so that a sweep over the cap shows what any number of moved blocks is worth."""

    def plan(self, view: ClusterView) -> Sequence[Move]:
        draft = Draft(view)
        request = next((r for r in view.loads[0].longest if r.movable_blocks), None) if 0 in view.loads else None
        left = request.movable_blocks if request else 0
        for creditor in sorted(set(view.loads) - {0}):
            num_blocks = min(left, draft.room_blocks(creditor))
            if request and num_blocks:
                draft.order(Move(request.req_id, 0, creditor, num_blocks))
                left -= num_blocks
        return draft.moves


class ByLastDigit:
    """The last digit of the prompt's length names the instance: a workload's file says where its requests go."""

    def choose(self, view: DispatchView, request: Request) -> int:
        return request.input_tokens % 10 % view.num_instances
