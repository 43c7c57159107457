"""The simulator as a whole: scenarios, macro steps against single iterations, replay, theory."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.eventlog import EventLog, Replay, read_log
from infsim.driver import Simulation
from perfmodel.cost import CostModel


class Commands:
    """Observer that keeps every command."""

    def __init__(self):
        self.commands = []
        self.busy_s = 0.0

    def event(self, t_s, machine, event):
        pass

    def command(self, t_s, machine, command):
        self.commands.append((t_s, machine, command))

    def span(self, machine, start_s, end_s, step):
        self.busy_s += end_s - start_s

    def note(self, t_s, what, **values):
        pass


def mixed(seed, n=60, longest=1400):
    rng = np.random.default_rng(seed)
    return list(zip(rng.integers(1, longest, n), rng.integers(1, 200, n), strict=True))


def statuses(result):
    return {s: result.requests["status"].count(s) for s in set(result.requests["status"])}


def test_oversized_request_is_rejected_by_name_and_the_others_finish(cluster, workload):
    result = Simulation(cluster(), workload([(2048, 128)] + [(512, 64)] * 20), check=True).run()
    assert statuses(result) == {"rejected": 1, "finished": 20}
    assert result.requests["reason"][0] == "needs at least 129 blocks, an instance has 100"


def test_request_that_outgrows_its_instance_fails_by_name(cluster, workload):
    result = Simulation(cluster(num_instances=1), workload([(1500, 500)]), check=True).run()
    assert result.requests["status"] == ["failed"]
    assert "needs 101 blocks, an instance has 100" in result.requests["reason"][0]


def test_router_counts_running_work(cluster, workload):
    spec = cluster(num_instances=8, num_blocks=7000)
    result = Simulation(spec, workload([(512, 100)] * 400, rate_rps=2.0)).run()
    shares = np.bincount(result.requests["instance"], minlength=8) / 400
    assert shares.min() >= 0.05
    assert shares.max() <= 0.25


def test_whole_prompt_admission(cluster, workload):
    """64K tokens of KV, two 60K prompts and 8 decodes: one prompt waits, and no decode row is preempted."""
    spec = cluster(num_instances=1, num_blocks=4096)
    result = Simulation(spec, workload([(64, 300)] * 8 + [(60_000, 50)] * 2), check=True).run()
    assert statuses(result) == {"finished": 10}
    assert sum(result.requests["num_preemptions"]) == 0
    first, second = sorted(zip(result.requests["first_token_s"][8:], result.requests["finish_s"][8:], strict=True))
    assert second[0] > first[1]


def test_latest_arrival_is_preempted_and_recomputed(cluster, workload):
    result = Simulation(cluster(num_instances=1), workload([(700, 300), (700, 300)]), check=True).run()
    assert statuses(result) == {"finished": 2}
    assert result.requests["num_preemptions"] == [0, 1]
    assert result.requests["preempted_s"][1] > 0


@pytest.mark.parametrize("batching", ["chunked", "prefill-first"])
@pytest.mark.parametrize("seed", range(6))
def test_macro_steps_agree_with_single_iterations(cluster, workload, batching, seed):
    """Same decisions, times within 1e-9 (relative), also under preemption."""
    load = workload(mixed(seed), rate_rps=[None, 5.0, 50.0][seed % 3], seed=seed)
    runs = [
        Simulation(cluster(batching=batching, macro=macro, max_batch=[None, 4][seed % 2]), load, check=True).run()
        for macro in (True, False)
    ]
    macro, single = (run.requests for run in runs)
    for name, column in macro.items():
        if name.endswith("_s"):
            values = [[np.nan if v is None else v for v in c] for c in (column, single[name])]
            np.testing.assert_allclose(*values, rtol=1e-9, atol=1e-9, err_msg=name)
        else:
            assert column == single[name], name
    ends = [run.marks["end"] for run in runs]
    assert ends[0].output_tokens == ends[1].output_tokens
    assert ends[0].attention_pairs == ends[1].attention_pairs
    assert ends[0].batch_s == pytest.approx(ends[1].batch_s, rel=1e-9)
    assert ends[0].kv_block_s == pytest.approx(ends[1].kv_block_s, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 120)), min_size=1, max_size=40),
    rate_rps=st.sampled_from([None, 2.0, 100.0]),
    batching=st.sampled_from(["chunked", "prefill-first"]),
    num_blocks=st.integers(10, 140),
    headroom_frac=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_every_prompt_that_is_not_rejected_is_admitted(
    cluster, workload, requests, rate_rps, batching, num_blocks, headroom_frac
):
    """In finite time, whatever the mix, with every invariant after every event and one final status each."""
    spec = cluster(num_blocks=num_blocks, batching=batching, headroom_frac=headroom_frac)
    result = Simulation(spec, workload(requests, rate_rps), check=True).run()
    assert result.requests["req_id"] == list(range(len(requests)))
    for status, reason, tokens in zip(
        result.requests["status"], result.requests["reason"], result.requests["input_tokens"], strict=True
    ):
        assert status in ("finished", "rejected", "failed")
        assert (status == "rejected") == (tokens // 16 + 1 > num_blocks)
        assert bool(reason) == (status != "finished")


def test_breakdown_sums_to_the_latency_and_times_are_ordered(cluster, workload):
    result = Simulation(cluster(), workload(mixed(3), rate_rps=20.0)).run().requests
    parts = [name for name in result if name.endswith("_s") and name not in ("arrival_s", "first_token_s", "finish_s")]
    for i in range(len(result["req_id"])):
        latency = result["finish_s"][i] - result["arrival_s"][i]
        assert sum(result[name][i] for name in parts) == pytest.approx(latency, abs=1e-9)
        assert all(result[name][i] >= -1e-9 for name in parts)


def test_replay_gives_identical_commands_and_tables(cluster, workload, tmp_path):
    spec, load = cluster(), workload(mixed(5), rate_rps=10.0)
    seen = Commands()
    Simulation(spec, load, seen).run()
    with (tmp_path / "events.jsonl").open("w") as file:
        result = Simulation(spec, load, EventLog(file, {"a": 1})).run()
    header, lines = read_log(tmp_path / "events.jsonl")
    replay = Replay(spec)
    again = replay.run(lines)
    assert header["config"] == {"a": 1}
    assert replay.commands == seen.commands
    assert again == result
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[1]).keys() >= {"t_s", "machine", "event"}


def test_latency_of_one_request_is_the_hand_computed_sum(cluster, workload):
    spec = cluster(num_instances=1)
    cost, message_s = spec.truth, spec.instance.inter_link.latency_s
    result = Simulation(spec, workload([(100, 20)])).run().requests

    def iteration_s(tokens, attention_s):
        kernel_s, launch_s, host_s = cost.iteration_terms(tokens, tokens if tokens == 1 else 0, 1)
        return max(kernel_s + attention_s, launch_s) + host_s

    terms = cost.decode_attention_terms(1)
    first = message_s + iteration_s(100, cost.prefill_attention_s(100, 0))
    decode = sum(iteration_s(1, terms.at(100 + i)) for i in range(1, 20))
    assert result["first_token_s"][0] == pytest.approx(first, rel=1e-12)
    assert result["finish_s"][0] == pytest.approx(first + decode, rel=1e-12)


def test_messages_take_as_long_as_was_measured(cluster, workload):
    spec = cluster(num_instances=1)
    engine = replace(spec.truth.instance.engine, message_s=0.5)
    slow = replace(spec, truth=CostModel(replace(spec.truth.instance, engine=engine), spec.truth.curves))
    first_s = [Simulation(s, workload([(100, 20)])).run().requests["first_token_s"][0] for s in (slow, spec)]
    assert first_s[0] - first_s[1] == pytest.approx(0.5 - spec.instance.inter_link.latency_s)


def test_md1_waiting_time(cluster, workload):
    """One instance, one row at a time, equal requests, Poisson arrivals: mean wait = ρ S / 2(1 − ρ) within 5 %."""
    spec = cluster(num_instances=1, max_batch=1, sample_s=1000.0)
    service_s = Simulation(spec, workload([(64, 8)])).run().requests["finish_s"][0] - spec.instance.inter_link.latency_s
    rho = 0.6
    result = Simulation(spec, workload([(64, 8)] * 25_000, rate_rps=rho / service_s, seed=11)).run()
    wait_s = np.mean(result.requests["queue_s"])
    assert wait_s == pytest.approx(rho * service_s / (2 * (1 - rho)), rel=0.05)


def test_littles_law(cluster, workload):
    """∫ decode rows dt = Σ time decoding: the instances' side and the requests' side of the accounting agree."""
    result = Simulation(cluster(num_blocks=8000), workload(mixed(9, n=200), rate_rps=30.0)).run()
    assert sum(result.requests["num_preemptions"]) == 0
    assert result.marks["end"].batch_s == pytest.approx(sum(result.requests["decode_s"]), rel=1e-9)


def test_throughput_is_below_the_roofline(cluster, workload):
    spec = cluster(num_instances=1, num_blocks=7000)
    result = Simulation(spec, workload([(512, 128)] * 300)).run()
    end, model, gpu = result.marks["end"], spec.instance.model, spec.instance.gpu
    flops = end.computed_tokens * model.matmul_flops_per_token + end.attention_pairs * model.attention_flops_per_pair
    assert flops / end.t_s < gpu.peak_flops_per_s
    weights_s = model.layer_matmul_params * model.num_layers * model.dtype_bytes / gpu.memory_bytes_per_s
    iterations_at_least = 128
    assert end.t_s > iterations_at_least * weights_s


def test_closed_loop_keeps_each_user_to_one_request(cluster, workload):
    load = workload([(64, 16)] * 40, users=3, window_kind="finishes")
    result = Simulation(cluster(num_instances=1), load, check=True).run()
    starts = [(t, 1) for t in result.requests["arrival_s"]] + [(t, -1) for t in result.requests["finish_s"]]
    inside = np.cumsum([d for _, d in sorted(starts, key=lambda s: (s[0], s[1]))])
    assert inside.max() == 3
    assert {"start", "window_start", "window_end", "end"} == set(result.marks)
