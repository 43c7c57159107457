"""`python -m infreal.demo`: one prompt over three instances that are too small for it, with a real model; the same text from one.

The model is SmolLM2-135M-Instruct out of its package. Prints both texts, and the ledger of who lent what.
"""

import sys

import numpy as np
import torch

from experiments.explain import validate
from experiments.plan import plan_cluster
from infreal.clocks import WallClock
from infreal.driver import InProcess
from infreal.generate import generate_ids, model_input
from infreal.model import load_decoder, open_checkpoint
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


def main() -> int:
    """Exit code 0; 1 where the texts differ, 2 where the model is not installed."""
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
    run = InProcess(make_cluster(num_blocks), Requests(workload, lambda _: ids), decoder, WallClock(skips_idle=True))
    result = run.run()
    shared, alone = run.outputs[0], list(generate_ids(decoder, ids, max_tokens=NEW_TOKENS))
    print(f"prompt, {len(ids)} tokens: {PROMPT}\n")
    print(
        f"{NUM_INSTANCES} instances, each with {num_blocks} KV blocks of {BLOCK_TOKENS} tokens:{tokenizer.decode(shared)}\n"
    )
    print(f"a single instance with room for all of it:{tokenizer.decode(alone)}\n")
    print("the same text\n" if shared == alone else "NOT the same text\n")
    print_ledger(result.moves)
    print(f"\nfree blocks at the end: {', '.join(f'{m.pool.free} of {num_blocks}' for m in run.machines.rmanagers)}")
    return int(shared != alone)


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
    sys.exit(main())
