"""`python -m infreal.demo [--ray]`: one prompt over three instances too small for it, with a real model; the same text from one.

The model is SmolLM2-135M-Instruct out of its package. Prints both texts, and the ledger of who lent what. With --ray the instances
are actors of a local Ray cluster.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from experiments import raycluster
from experiments.explain import validate
from experiments.plan import plan_cluster
from infreal.cli import OneLineParser
from infreal.clocks import WallClock
from infreal.driver import InProcess
from infreal.generate import generate_ids, model_input
from infreal.model import Decoder, load_decoder, open_checkpoint
from infreal.requests import Requests
from perfmodel.cluster import ClusterSpec, Workload
from perfmodel.errors import InputError
from perfmodel.records import Table

CAPITALS = {
    "Italy": "Rome",
    "Spain": "Madrid",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
}
CAPITALS |= {"Norway": "Oslo", "Sweden": "Stockholm", "Poland": "Warsaw", "Portugal": "Lisbon", "Peru": "Lima"}
PROMPT = (
    "".join(f"The capital of {country} is {city}. " for country, city in CAPITALS.items()) + "The capital of France is"
)
NEW_TOKENS, NUM_INSTANCES, BLOCK_TOKENS = 16, 3, 4


def main(argv: Sequence[str] = ()) -> int:
    """Exit code 0; 1 where the texts differ, 2 where the model is not installed."""
    parser = OneLineParser(prog="demo-real", description="One prompt over three instances too small for it.")
    parser.add_argument("--ray", action="store_true", help="instances as actors of a local Ray cluster")
    return run_demo(parser.parse_args(argv))


def run_demo(args: argparse.Namespace) -> int:
    try:
        with model_input():
            checkpoint = open_checkpoint("smollm2")
            tokenizer, decoder = checkpoint.tokenizer(), load_decoder(checkpoint, torch.float32)
    except InputError as error:
        print(f"demo-real: {error}", file=sys.stderr)
        return 2
    ids = tokenizer.encode(PROMPT)
    num_blocks = -(-(len(ids) + NEW_TOKENS) // (NUM_INSTANCES * BLOCK_TOKENS)) + 1
    workload = Workload(np.zeros(1), np.array([len(ids)]), np.array([NEW_TOKENS]))
    share = share_on_ray if args.ray else share_here
    shared, moves, free = share(num_blocks, Requests(workload, Fixed(ids)), decoder)
    alone = list(generate_ids(decoder, ids, max_tokens=NEW_TOKENS))
    print(f"prompt, {len(ids)} tokens: {PROMPT}\n")
    print(
        f"{NUM_INSTANCES} instances, each with {num_blocks} KV blocks of {BLOCK_TOKENS} tokens:{tokenizer.decode(shared)}\n"
    )
    print(f"a single instance with room for all of it:{tokenizer.decode(alone)}\n")
    print("the same text\n" if shared == alone else "NOT the same text\n")
    print_ledger(moves)
    print(f"\nfree blocks at the end: {', '.join(f'{count} of {num_blocks}' for count in free)}")
    return int(shared != alone)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same prompt for every request."""

    ids: Sequence[int]

    def __call__(self, req_id: int) -> list[int]:
        return list(self.ids)


Shared = tuple[list[int], Table, list[int]]  # the new tokens, who lent what, free blocks at the end


def share_here(num_blocks: int, requests: Requests, decoder: Decoder) -> Shared:
    run = InProcess(make_cluster(num_blocks), requests, decoder, WallClock(skips_idle=True))
    moves = run.run().moves
    return run.outputs[0], moves, [manager.pool.free for manager in run.machines.rmanagers]


def share_on_ray(num_blocks: int, requests: Requests, decoder: Decoder) -> Shared:
    with raycluster.connected(raycluster.LOCAL, num_cpus=NUM_INSTANCES):
        from infreal.actors.run import make_head

        head = make_head(partial(make_cluster, num_blocks), lambda group: load_smollm2(), requests)
        moves = head.run().moves
    return head.outputs[0], moves, head.free_blocks()


def load_smollm2() -> Decoder:
    return load_decoder(open_checkpoint("smollm2"), torch.float32)


def make_cluster(num_blocks: int) -> ClusterSpec:
    """Three instances on this machine that lend each other memory."""
    config = {
        "system": "infinite-llm",
        "model": "smollm2-135m",
        "dtype": "float32",
        "gpu": "cpu",
        "cluster": {"nodes": 1, "gpus_per_node": NUM_INSTANCES, "intra_link": "loopback", "inter_link": "loopback"},
        "instance": {
            "blocks_per_gpu": num_blocks,
            "block_tokens": BLOCK_TOKENS,
            "token_budget": 32,
            "headroom_frac": 0.0,
        },
        "workload": {"generator": "fixed", "params": {"input_tokens": 1, "output_tokens": 1}},
    }
    return plan_cluster(validate(config, "demo"))


def print_ledger(moves: Table) -> None:
    """Who lent what to whom, and what went back before the request had ended."""
    print("who lent what:")
    columns = ("src", "dst", "num_blocks", "kind", "committed_s", "outcome")
    for src, dst, num_blocks, kind, committed_s, outcome in zip(*(moves[name] for name in columns), strict=True):
        when = " " * 8 if committed_s is None else f"{committed_s:6.2f} s"
        what = f"{num_blocks} KV blocks ({num_blocks * BLOCK_TOKENS} tokens)"
        if kind in ("back", "reclaim"):
            print(f"{when}  instance-{src} gives instance-{dst} {what} back ({outcome})")
        else:
            print(f"{when}  instance-{dst} lends instance-{src} {what} ({kind}, {outcome})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
