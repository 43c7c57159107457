"""Policies by name, and what a policy of your own must offer.

A policy is a class in a Python file, named `my_policy.py:MyPolicy` in the configuration. It is created without arguments, once
per run (dispatch, placement) or per instance (batching), must decide from what it is shown alone, and draws no random numbers
of its own.

- dispatch: `choose(view: DispatchView, request: Request) -> int`, the instance to send a request to.
- batching: `first_come: bool` and `plan(view: BatchView) -> Plan`, who runs next.
"""

from perfmodel.batching import BatchingPolicy
from perfmodel.dispatcher import DispatchPolicy
from perfmodel.policies.batching import Chunked, PrefillFirst
from perfmodel.policies.dispatch import LeastLoaded, RoundRobin

DISPATCH: dict[str, type[DispatchPolicy]] = {"least-loaded": LeastLoaded, "round-robin": RoundRobin}
BATCHING: dict[str, type[BatchingPolicy]] = {"chunked": Chunked, "prefill-first": PrefillFirst}
