"""Pooled memory in the simulator: moves happen, nothing leaks, macro steps agree with single iterations."""

import numpy as np
import pytest

from experiments.eventlog import EventLog, Replay, read_log
from infsim.driver import Simulation
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
    """The oversized scenario with a pool: A finishes, ≥ 36 blocks are borrowed at its peak, and the ledger is back at 0."""
    spec = cluster(placement=PLACEMENT["greedy"])
    result = Simulation(spec, workload([(2048, 128)] + [(512, 64)] * 20), check=True).run()
    assert set(result.requests["status"]) == {"finished"}
    assert result.requests["remote_tokens_max"][0] >= 36 * 16
    assert result.instances["borrowed_blocks"][-2:] == [0, 0]


def test_two_prompts_larger_than_an_instance_both_finish(cluster, workload):
    spec = cluster(num_instances=3, placement=PLACEMENT["greedy"])
    result = Simulation(spec, workload([(300, 100)] * 30 + [(2500, 50), (2600, 50)]), check=True).run()
    assert set(result.requests["status"]) == {"finished"}


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
    """Observer that keeps every command."""

    def __init__(self):
        self.commands = []

    def command(self, t_s, machine, command):
        self.commands.append((t_s, machine, command))

    def event(self, *_):
        pass

    span = event

    def note(self, *_, **values):
        pass
