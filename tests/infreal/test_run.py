"""`infreal run`: the same configuration, folder, event log and policies as in simulation, on real iterations."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from pool_tools import CONFIG, Checked, Prompts, Restless, cluster, reference, tiny_decoder, workload
from safetensors.torch import save_file

from experiments.eventlog import EventLog, Replay, read_log
from experiments.runs import load_runs
from infreal.clocks import SteppedClock, WallClock
from infreal.driver import InProcess
from infreal.requests import Requests
from infreal.run import main
from infsim.__main__ import main as infsim_main
from perfmodel.cluster import Workload
from perfmodel.journal import Together

pytestmark = pytest.mark.usefixtures("one_thread")
SWEEP = """
base:
  model: model/config.json
  gpu: cpu
  cluster: {nodes: 1, gpus_per_node: 3, intra_link: loopback, inter_link: loopback}
  instance: {blocks_per_gpu: 30, block_tokens: 4, token_budget: 64, headroom_frac: 0.0}
  scheduler: {period_s: 0.2, heartbeat_s: 0.2}
  workload: {generator: fixed, params: {input_tokens: 60, output_tokens: 9}, num_requests: 6, arrivals: saturated}
axes:
  system: [vllm-multi, infinite-llm]
"""
POLICY = """
class ByLength:
    def choose(self, view, request):
        return request.input_tokens % view.num_instances
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a sweep over a random model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(capsys, *arguments):
    """The one line on stderr of a command that ends with exit code 2."""
    capsys.readouterr()
    assert main(["sweep.yaml", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_sweep_writes_the_folder_of_a_simulation_and_replays(folder, capsys):
    assert main(["sweep.yaml", "--out", "real", "--no-wait", "--events", "--timeline"]) == 0
    assert "Trust: all times were measured (cpu" in capsys.readouterr().out
    assert infsim_main(["run", "sweep.yaml", "--workers", "1", "--out", "simulated", "--events", "--timeline"]) == 0
    real, simulated = load_runs("real"), load_runs("simulated")
    assert list(real.summary) == list(simulated.summary)
    for name in ("requests", "instances", "moves"):
        assert list(getattr(real, name)) == list(getattr(simulated, name))
    assert set(real.requests["status"]) == {"finished"}
    assert set(real.requests["output_tokens"]) == {9}
    for a, b in zip(real.folders, simulated.folders, strict=True):
        assert sorted(path.name for path in a.iterdir()) == sorted(path.name for path in b.iterdir())
    log = real.folders[1] / "events.jsonl"
    capsys.readouterr()
    assert infsim_main(["replay", str(log), "--out", "replayed"]) == 0
    assert "Trust: all times were measured (cpu" in capsys.readouterr().out
    assert infsim_main(["replay", str(log), "--out", "under its times", "--simulate"]) == 0
    assert "B simulated under the recorded times" in capsys.readouterr().out
    for name in ("requests", "instances", "moves"):
        again = pd.read_parquet(next(folder.glob(f"replayed/runs/*/{name}.parquet")))
        pd.testing.assert_frame_equal(pd.read_parquet(real.folders[1] / f"{name}.parquet"), again)


def test_a_folder_of_simulated_runs_is_not_taken_for_this_one(folder, capsys):
    assert infsim_main(["run", "sweep.yaml", "--workers", "1", "--out", "out"]) == 0
    assert "carried out in simulation there and in hardware here" in complaint(capsys, "--out", "out")


class Commands:
    """Observer that keeps every command."""

    def __init__(self):
        self.commands = []

    def command(self, t_s, machine, command):
        self.commands.append((t_s, machine, command))

    def event(self, t_s, machine, event): ...
    def span(self, machine, start_s, end_s, step): ...
    def note(self, t_s, what, **values): ...


def test_the_log_of_a_real_run_gives_fresh_machines_the_same_commands(tmp_path):
    """Moves, prompts across instances, growth and preemption: every command at its time."""
    spec = cluster(3, 40, placement=Restless)
    load = workload([(30, 40)] * 4 + [(150, 20), (20, 40)], gap_s=0.05)
    seen = Commands()
    with (tmp_path / "events.jsonl").open("w") as file:
        run = Checked(spec, load, observer=Together([EventLog(file, {}), seen])).finish()
    replay = Replay(spec)
    result = replay.run(read_log(tmp_path / "events.jsonl")[1])
    assert run.count("throughput") > 0
    assert replay.commands == seen.commands
    assert result == run.result


def test_a_policy_file_decides_as_in_simulation(folder):
    (folder / "policy.py").write_text(POLICY)
    lengths = "arrival_s,input_tokens,output_tokens,id\n" + "".join(f"{i / 100},{20 + i},3,r{i}\n" for i in range(9))
    (folder / "trace.csv").write_text(lengths)
    (folder / "own.yaml").write_text(
        SWEEP.partition("axes:")[0].replace("workload: {generator", "# {")
        + "  system: vllm-multi\n  dispatch: policy.py:ByLength\n  workload: {trace: own, path: trace.csv}\n"
    )
    assert main(["own.yaml", "--out", "real", "--no-wait"]) == 0
    assert infsim_main(["run", "own.yaml", "--workers", "1", "--out", "simulated"]) == 0
    real, simulated = load_runs("real"), load_runs("simulated")
    assert real.requests["instance"].tolist() == simulated.requests["instance"].tolist()
    assert real.requests["instance"].tolist() == [(20 + i) % 3 for i in range(9)]
    name = next(key for key in real.manifests[0]["inputs"] if key.endswith("policy.py"))
    assert real.manifests[0]["inputs"][name] == simulated.manifests[0]["inputs"][name]


def test_outputs_end_early_only_where_that_is_asked_for():
    """At the first end token, and the records say how long they became."""
    load, decoder = workload([(20, 30), (25, 30)]), tiny_decoder()
    prompts = Prompts(load)
    expected = [reference(decoder, prompts(i), 30)[0] for i in range(2)]
    stop = expected[0][7]
    run = InProcess(cluster(1, 60, placement=None), Requests(load, prompts, (stop,)), decoder, SteppedClock())
    result = run.run()
    lengths = [ids.index(stop) + 1 if stop in ids else 30 for ids in expected]
    assert lengths[0] <= 8
    assert [run.outputs[i] for i in range(2)] == [ids[:n] for ids, n in zip(expected, lengths, strict=True)]
    assert result.requests["output_tokens"] == lengths


def test_send_times_are_absolute():
    """A late request does not make the next one late."""
    load = workload([(10, 2)] * 40, gap_s=0.05)
    clock = SteppedClock()
    result = InProcess(cluster(1, 60, placement=None), Requests(load, Prompts(load)), tiny_decoder(), clock).run()
    late_s = np.array(result.requests["arrival_s"]) - load.arrival_s
    assert late_s.min() >= 0
    assert late_s.max() < 0.03


def test_idle_time_is_slept_through_or_skipped():
    waits, skips = WallClock(), WallClock(skips_idle=True)
    for clock in (waits, skips):
        clock.wait_until(0.2)
        assert 0.2 <= clock.now_s() < 5.0
    skips.wait_until(1e6)
    assert 1e6 <= skips.now_s() < 1e6 + 5.0


def test_clients_that_go_away_leave_nothing_behind():
    load = workload([(60, 60), (20, 30), (90, 50), (30, 40)])
    load = Workload(load.arrival_s, load.input_tokens, load.output_tokens, patience_s=np.array([0.3, 9e9, 0.5, 9e9]))
    run = Checked(cluster(2, 120, placement=Restless), load).finish()
    assert run.result.requests["status"] == ["aborted", "finished", "aborted", "finished"]
    for req_id in (1, 3):
        assert run.run.outputs[req_id] == reference(tiny_decoder(), run.prompts(req_id), load.output_tokens[req_id])[0]
    assert all(manager.pool.free == 120 for manager in run.run.machines.rmanagers)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["instance.tensor_parallel=2", "cluster.gpus_per_node=4"],
            "instance.tensor_parallel: 2 (allowed in one process: 1; with --ray each rank is an actor)",
        ),
        (["instance.tensor_parallel=[2, 1]"], "instance.tensor_parallel: should be a valid integer, found [2, 1]"),
        (["layout=single"], "instance.pipeline_parallel: 3 (allowed on hardware: 1)"),
        (["chaos={loss: 0.1}"], "chaos: faults are injected in simulation (allowed on hardware: null)"),
        (["kv_dtype=float16"], "kv_dtype: float16 (allowed on hardware: the model's own dtype)"),
        (["real.stop_at_eos=true"], "real.stop_at_eos: model"),
        (["real.weights=nothing.gguf"], "nothing.gguf' is not there (allowed: a Hugging Face directory"),
        (["instance.blocks_per_gpu=2000000000"], "GB are available on cpu"),
        (["real.wieghts=x"], "did you mean 'weights'"),
        (["model=gpt5"], "gpt5"),
    ],
)
def test_wrong_input_is_one_line(folder, capsys, settings, said):
    pairs = [text for setting in settings for text in ("--set", setting)]
    assert said in complaint(capsys, "--out", "out", *pairs)


def test_weights_of_another_shape_are_refused(folder, capsys):
    other = folder / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 2}))
    save_file({"model.norm.weight": torch.ones(48)}, other / "model.safetensors")
    assert "other has num_layers 2, model" in complaint(capsys, "--set", f"real.weights={other}")


def test_damaged_weights_are_refused(folder, capsys):
    (folder / "model" / "model.safetensors").write_bytes(b"\0" * 100)
    assert "model.safetensors" in complaint(capsys, "--out", "out")


def test_nccl_wants_actors_on_gpus(folder, capsys):
    assert "--transport: nccl (allowed without --ray" in complaint(capsys, "--out", "out", "--transport", "nccl")


def test_wrong_usage_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--no-such-option"])
    assert exit_.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_dry_run_writes_nothing(folder, capsys):
    assert main(["sweep.yaml", "--out", "out", "--dry-run"]) == 0
    assert "longest request 360" in capsys.readouterr().out
    assert not (folder / "out").exists()
