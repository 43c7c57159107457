"""Runs of small models on several instances: clusters, prompts, references, and a pool whose free blocks hold NaN."""

from dataclasses import dataclass, field
from functools import cache, partial
from random import Random

import numpy as np
import torch

from experiments.catalogue import load_engine, load_gpu, load_link
from experiments.hf_config import model_from_config
from experiments.packs import cost_model
from infreal.clocks import SteppedClock
from infreal.driver import InProcess, Options
from infreal.generate import generate_ids
from infreal.model import config_from_hf, random_decoder
from infreal.requests import Requests
from infreal.transport.group import ALONE
from perfmodel.cluster import ClusterSpec, Workload
from perfmodel.policies import BATCHING, DISPATCH, PLACEMENT
from perfmodel.specs import InstanceSpec
from perfmodel.view import Move, SchedulerParams

BLOCK_TOKENS = 4
CONFIG = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "dtype": "float32",
}
QUICK = SchedulerParams(
    period_s=0.2, heartbeat_s=0.1, lease_s=20.0, renew_s=1.0, move_tokens_per_iteration=8, lent_cap_frac=0.9
)


WIDE = CONFIG | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}  # four ranks divide it


@cache
def tiny_decoder(num_layers=3, seed=0):
    return random_decoder(config_from_hf(CONFIG | {"num_hidden_layers": num_layers}, "tiny"), seed)


def wide_decoder(group=ALONE):
    return random_decoder(config_from_hf(WIDE, "wide"), 0, group=group)


def cluster(num_instances, num_blocks, model=None, **changes):
    """A spec of equal instances. Policies by name or as classes; `block_tokens` of the pool."""
    block_tokens, tensor_parallel = changes.pop("block_tokens", BLOCK_TOKENS), changes.pop("tensor_parallel", 1)
    instance = InstanceSpec(
        model or model_from_config("tiny", CONFIG, where="tiny"),
        load_gpu("a100-80gb"),
        load_engine("graphs"),
        load_link("nvlink3"),
        load_link("ethernet-100g"),
        block_tokens=block_tokens,
        tensor_parallel=tensor_parallel,
    )
    cost = cost_model(instance, "analytic", None)
    placement = changes.pop("placement", "greedy")
    defaults = {
        "token_budget": 64,
        "dispatch": DISPATCH["least-loaded"],
        "batching": BATCHING["chunked"],
        "placement": PLACEMENT.get(placement, placement),
        "scheduler": QUICK,
        "headroom_frac": 0.0,
        "belief": cost,
        "truth": cost,
    }
    return ClusterSpec(
        **{
            "instance": instance,
            "num_instances": num_instances,
            "nodes": (0,) * num_instances,
            "num_blocks": num_blocks,
        }
        | defaults
        | changes
    )


class Restless:
    """Any planner: orders moves of random size between random instances, all the time."""

    def __init__(self):
        self._draw = Random(0)

    def plan(self, view):
        draw, moves = self._draw, []
        for src, load in view.loads.items():
            others = [i for i in view.loads if i != src]
            for movable in load.longest if others else ():
                dst = draw.choice(others)
                if movable.movable_blocks:
                    moves.append(Move(movable.req_id, src, dst, draw.randint(1, movable.movable_blocks)))
        return moves


def workload(lengths, gap_s=0.0):
    """lengths: (input_tokens, output_tokens) in order of arrival."""
    inputs, outputs = np.array(lengths, dtype=np.int64).T
    return Workload(np.arange(len(inputs)) * gap_s, inputs, outputs)


@dataclass
class Prompts:
    """Fixed random prompts."""

    load: Workload
    vocab_size: int = 300
    seed: int = 0

    def __call__(self, req_id):
        draw = np.random.default_rng((self.seed, req_id))
        return draw.integers(self.vocab_size, size=int(self.load.input_tokens[req_id])).tolist()


def reference(decoder, prompt, num_new):
    """Tokens and logits of one instance without a scheduler."""
    logits = []

    def pick(line):
        logits.append(line)
        return int(line.argmax())

    return list(generate_ids(decoder, prompt, max_tokens=num_new, pick=pick)), torch.stack(logits)


@dataclass
class Checked:
    """A run with every invariant checked, NaN in every block that is free, and the logits of each new token kept."""

    spec: ClusterSpec
    load: Workload
    decoder: object = field(default_factory=tiny_decoder)
    observer: object = None
    prompts: object = None  # req_id → token ids; random ones by default
    logits: dict = field(default_factory=dict)

    def __post_init__(self):
        self.prompts = self.prompts or Prompts(self.load, self.decoder.config.vocab_size)
        requests = Requests(self.load, self.prompts)
        self.run = InProcess(self.spec, requests, self.decoder, SteppedClock(), self.observer, Options(check=True))
        for executor, manager in zip(self.run.executors, self.run.machines.rmanagers, strict=True):
            executor.watch_logits = self._keep
            poison_free_blocks(manager, executor.kv_pool)

    def _keep(self, req_id, line):
        self.logits.setdefault(req_id, []).append(line.clone())

    def at(self, time_s, what, *args):
        """Call what(self, *args) at that time of the run."""
        self.run._at(time_s, partial(what, self, *args))

    def ask_back(self, instance, num_blocks=5):
        """A creditor wants so many more of its blocks back."""
        lender = self.run.machines.rmanagers[instance].creditor
        kept = sum(loan.keep for loan in lender.loans.values() if not loan.capacity)
        for command in lender.reclaim(lender.pool.total - kept + num_blocks) if kept else ():
            self.run._perform(instance, command)

    def finish(self):
        self.result = self.run.run()
        return self

    def count(self, kind, outcome="committed"):
        moves = self.result.moves
        return list(zip(moves["kind"], moves["outcome"], strict=True)).count((kind, outcome))

    def assert_exact(self):
        """Every request has the tokens of a single instance, logits within 1e-4 (of the largest, where that is above 1); every
        block of every instance is free."""
        assert set(self.result.requests["status"]) == {"finished"}, self.result.requests["reason"]
        for req_id in range(len(self.load)):
            tokens, logits = reference(self.decoder, self.prompts(req_id), int(self.load.output_tokens[req_id]))
            assert self.run.outputs[req_id] == tokens, f"request {req_id}"
            error = (torch.stack(self.logits[req_id]) - logits).abs().max()
            assert error <= 1e-4 * max(1.0, logits.abs().max()), f"request {req_id}: a logit is off by {error:.2e}"
        for manager in self.run.machines.rmanagers:
            assert manager.pool.free == self.spec.num_blocks


def poison_free_blocks(manager, *kv_pools):
    """Whatever is free holds NaN in the pools of all ranks, from the event on that frees it."""
    for kv_pool in kv_pools:
        kv_pool.fill_(torch.nan)
    handle, free = manager.handle, set(range(manager.pool.total))

    def poisoned(event, now_s):
        commands = handle(event, now_s)
        now_free = set(manager.pool.free_ids())
        fresh = sorted(now_free - free)
        for kv_pool in kv_pools if fresh else ():
            kv_pool[fresh] = torch.nan
        free.clear()
        free.update(now_free)
        return commands

    manager.handle = poisoned
