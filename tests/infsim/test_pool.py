"""Pooled memory in the simulator: moves happen, nothing leaks, macro steps agree with single iterations."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import infsim
from experiments.eventlog import EventLog, Replay, read_log
from infsim.driver import Simulation
from infsim.simulate import simulate
from perfmodel.cluster import ChaosParams
from perfmodel.messages import GMANAGER, StartTransfer
from perfmodel.policies import PLACEMENT


def heavy_tail(seed, n=80):
    """Many short requests, and a few that fill most of an instance."""
    rng = np.random.default_rng(seed)
    short = list(zip(rng.integers(100, 600, n), rng.integers(40, 160, n), strict=True))
    for i in range(0, n, 10):
        short[i] = (int(rng.integers(4000, 7000)), int(rng.integers(200, 400)))
    return short


@pytest.mark.parametrize("placement", ["greedy", "reactive", "none"])
def test_pool_serves_everything_and_comes_to_rest(cluster, workload, placement):
    spec = cluster(num_instances=4, num_blocks=500, placement=PLACEMENT[placement])
    result = Simulation(spec, workload(heavy_tail(1), rate_rps=40.0), check=True).run()
    assert set(result.requests["status"]) == {"finished"}
    moves = list(zip(result.moves["kind"], result.moves["outcome"], strict=True))
    assert (("throughput", "committed") in moves) == (placement != "none")
    last = {name: column[-4:] for name, column in result.instances.items()}
    for name in ("reserved_blocks", "lent_blocks", "draining_blocks", "borrowed_blocks", "pledged_blocks"):
        assert last[name] == [0] * 4
    assert last["free_blocks"] == [500] * 4


@pytest.mark.parametrize("seed", range(4))
def test_macro_steps_agree_with_single_iterations(cluster, workload, seed):
    load = workload(heavy_tail(seed), rate_rps=[20.0, 60.0][seed % 2], seed=seed)
    runs = [
        Simulation(
            cluster(num_instances=4, num_blocks=500, placement=PLACEMENT["greedy"], macro=macro), load, check=True
        ).run()
        for macro in (True, False)
    ]
    for table in ("requests", "moves"):
        macro, single = (getattr(run, table) for run in runs)
        for name, column in macro.items():
            if name.endswith("_s"):
                values = [[np.nan if v is None else v for v in c] for c in (column, single[name])]
                np.testing.assert_allclose(*values, rtol=1e-9, atol=1e-9, err_msg=name)
            else:
                assert column == single[name], name
    assert runs[0].moves["outcome"].count("committed") > 0


def test_oversized_request_borrows_and_gives_back(cluster, workload):
    """The oversized scenario with a pool: at least 29 blocks are borrowed for A's prompt, 36 at its peak, and all finish."""
    spec = cluster(placement=PLACEMENT["greedy"])
    result = Simulation(spec, workload([(2048, 128)] + [(512, 64)] * 20), check=True).run()
    assert set(result.requests["status"]) == {"finished"}
    moves = zip(*(result.moves[name] for name in ("req_id", "kind", "outcome", "num_blocks")), strict=True)
    assert next(move for move in moves if move[:3] == (0, "capacity", "committed"))[3] >= 29
    assert result.requests["remote_tokens_max"][0] >= 36 * 16
    assert result.instances["borrowed_blocks"][-2:] == result.instances["lent_blocks"][-2:] == [0, 0]


def test_two_prompts_larger_than_an_instance_both_finish(cluster, workload):
    spec = cluster(num_instances=3, placement=PLACEMENT["greedy"])
    result = Simulation(spec, workload([(300, 100)] * 30 + [(2500, 50), (2600, 50)]), check=True).run()
    assert set(result.requests["status"]) == {"finished"}


# ---- any mix of lengths ------------------------------------------------------------------------------------------------------
SYSTEMS = {"vllm-multi": None, "vllm-single": None, **PLACEMENT}
EVENTS_PER_REQUEST = 100  # a request waits a few leases for room; meanwhile every instance speaks a few times a second


@st.composite
def mixes(draw):
    """(instances, blocks of one, requests): short prompts, prompts of several instances, of the whole pool and just beyond."""
    instances, blocks = draw(st.integers(2, 4)), draw(st.integers(1, 40))
    pool_tokens = instances * blocks * 16
    inputs = st.integers(1, blocks * 16) | st.integers(1, pool_tokens) | st.integers(pool_tokens - 2, pool_tokens)
    outputs = st.integers(1, 100) | st.integers(1, pool_tokens)
    return instances, blocks, draw(st.lists(st.tuples(inputs, outputs), min_size=1, max_size=20))


@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=40, deadline=None)
@given(
    mix=mixes(),
    rate_rps=st.sampled_from([None, 2.0, 100.0]),
    headroom_frac=st.sampled_from([0.0, 0.1, 0.3]),
    batching=st.sampled_from(["chunked", "prefill-first"]),
)
@example((3, 20, [(700, 60), (800, 60), (900, 60)]), None, 0.0, "chunked")  # each larger than an instance, all at once
@example((2, 10, [(319, 1), (319, 1)]), None, 0.0, "chunked")  # prompt + 1 = the pool
@example((2, 10, [(100, 400), (310, 200)]), 2.0, 0.0, "chunked")  # both outgrow the pool
@example((3, 1, [(20, 5), (5, 30), (3, 3)]), None, 0.0, "chunked")  # instances of a single block
def test_any_mix_of_lengths_ends(cluster, workload, system, mix, rate_rps, headroom_frac, batching):
    """Every request in the one status that its lengths call for, with all memory free, after a bounded number of events."""
    instances, blocks, requests = mix
    if system == "vllm-single":  # all memory is one instance's
        instances, blocks = 1, instances * blocks
    options = {"placement": SYSTEMS[system], "headroom_frac": headroom_frac, "batching": batching}
    spec = cluster(instances, blocks, **options)
    seen = Commands()
    result = simulate(spec, workload(requests, rate_rps), seen)
    assert result.requests["req_id"] == list(range(len(requests)))
    for lengths, status, reason in zip(requests, result.requests["status"], result.requests["reason"], strict=True):
        check_status(spec.largest_blocks, *lengths, status, reason)
    assert result.instances["free_blocks"][-instances:] == [blocks] * instances
    tokens = sum(min(sum(lengths), 16 * spec.largest_blocks) for lengths in requests)
    assert seen.num_events <= instances * (EVENTS_PER_REQUEST * len(requests) + tokens)


def check_status(largest_blocks, input_tokens, output_tokens, status, reason):
    """The last token needs no KV. (A row that is preempted just before it asks for room for it: that may be a block too many.)"""
    room = 16 * largest_blocks - (input_tokens + output_tokens - 1)
    if input_tokens // 16 + 1 > largest_blocks:
        assert status == "rejected" and f"needs at least {input_tokens // 16 + 1} blocks" in reason
    elif status == "failed":
        assert room <= 0 and "outgrew" in reason and f"needs {largest_blocks + 1} blocks" in reason
    else:
        assert room >= 0 and (status, reason) == ("finished", "")


def test_a_mix_of_lengths_ends_in_every_system_as_a_run(tmp_path):
    """The same by `infsim run`: from one token to all but one of the pool's 1,280, and one request too long for it."""
    lengths = [(1, 1), (319, 1), (320, 5), (1279, 1), (900, 300), (700, 200), (1280, 1), (300, 1200)]
    rows = [f"{i * 0.01},{a},{b}" for i, (a, b) in enumerate(lengths)]
    (tmp_path / "mix.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]) + "\n")
    base = {
        "cluster": {"nodes": 1, "gpus_per_node": 4},
        "instance": {"blocks_per_gpu": 20, "headroom_frac": 0.0},
        "workload": {"trace": "own", "path": str(tmp_path / "mix.csv")},
    }
    # finished, failed, rejected
    systems = {"vllm-multi": (2, 1, 5), "vllm-single": (6, 1, 1), "infinite-llm": (6, 1, 1)}
    runs = infsim.run({"base": base, "axes": {"system": list(systems)}}, out=tmp_path / "out")
    found = runs.summary.set_index("system")[["num_finished", "num_failed", "num_rejected"]]
    assert {system: tuple(row) for system, *row in found.itertuples()} == systems


def test_replay_of_a_pool_under_faults_gives_identical_commands_and_tables(cluster, workload, tmp_path):
    """Killed and returned instances, and a restarted gManager, included."""
    chaos = ChaosParams(delay_s=0.01, duplicate=0.1, loss=0.1, kill=((1.0, 2, 6.0), (2.0, GMANAGER, 5.0)))
    spec = cluster(num_instances=4, num_blocks=500, placement=PLACEMENT["greedy"], chaos=chaos)
    load, seen = workload(heavy_tail(2), rate_rps=40.0), Commands()
    Simulation(spec, load, seen).run()
    with (tmp_path / "events.jsonl").open("w") as file:
        result = Simulation(spec, load, EventLog(file, {})).run()
    replay = Replay(spec)
    again = replay.run(read_log(tmp_path / "events.jsonl")[1])
    assert replay.commands == seen.commands
    assert again == result
    assert any(isinstance(command, StartTransfer) for _, _, command in seen.commands)


class Commands:
    """Observer that keeps every command, and counts events."""

    def __init__(self):
        self.commands, self.num_events = [], 0

    def command(self, t_s, machine, command):
        self.commands.append((t_s, machine, command))

    def event(self, *_):
        self.num_events += 1

    def span(self, *_):
        pass

    def note(self, *_, **values):
        pass
