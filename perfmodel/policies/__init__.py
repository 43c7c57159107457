"""Policies by name, and what a policy of your own must offer.

A policy is a class in a Python file, named `my_policy.py:MyPolicy` in the configuration. It is created without arguments, once
per run (dispatch, placement) or per instance (batching), must decide from what it is shown alone, and draws no random numbers
of its own.

- dispatch: `choose(view: DispatchView, request: Request) -> int`, the instance to send a request to.
- batching: `first_come: bool` and `plan(view: BatchView) -> Plan`, who runs next.
- placement: `plan(view: ClusterView) -> Sequence[Move]`, which KV to lend; asked once a scheduler period. The view
  (perfmodel.view) holds the last heartbeat of every live instance (`loads`), the belief cost model, the scheduler's parameters
  and the links; it may be stale. A `Move` is advice: its debtor and its creditor repeat every check, and what no longer holds
  is refused and waits for a later plan. `perfmodel.policies.draft.Draft` keeps count of room while a plan is made,
  `perfmodel.gain.Pricer` says what a move is worth.
"""

from perfmodel.batching import BatchingPolicy
from perfmodel.dispatcher import DispatchPolicy
from perfmodel.policies.batching import Chunked, PrefillFirst
from perfmodel.policies.dispatch import LeastLoaded, RoundRobin
from perfmodel.policies.greedy import Greedy
from perfmodel.policies.placement import NoPlacement, Reactive
from perfmodel.view import PlacementPolicy

DISPATCH: dict[str, type[DispatchPolicy]] = {"least-loaded": LeastLoaded, "round-robin": RoundRobin}
BATCHING: dict[str, type[BatchingPolicy]] = {"chunked": Chunked, "prefill-first": PrefillFirst}
PLACEMENT: dict[str, type[PlacementPolicy]] = {"none": NoPlacement, "reactive": Reactive, "greedy": Greedy}
