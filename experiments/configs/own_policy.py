"""A dispatch policy of one's own: long prompts get instances for themselves, so that short ones do not wait behind them.

    infsim run own-policy

A policy is created without arguments, once per run, and is asked for every request (perfmodel/policies/__init__.py says
what each kind of policy must offer). The same file works in simulation and on hardware.
"""

from perfmodel.dispatcher import DispatchView
from perfmodel.messages import Request

LONG_TOKENS = 16_384
SHARE_FOR_LONG = 0.25


class LongApart:
    """The last quarter of the instances is for prompts of 16K tokens and more; within each part, the least loaded one."""

    def choose(self, view: DispatchView, request: Request) -> int:
        """`view.load_blocks[i]`: KV blocks of running and waiting work of instance i. Output lengths are not visible."""
        first_for_long = view.num_instances - max(1, int(SHARE_FOR_LONG * view.num_instances))
        if request.input_tokens >= LONG_TOKENS:
            part = range(first_for_long, view.num_instances)
        else:
            part = range(first_for_long)
        return min(part, key=lambda i: view.load_blocks[i])
