"""From configuration to cluster: layouts, policies of a user, workloads, and input that does not fit."""

from pathlib import Path

import pytest

from experiments.plan import plan_run
from experiments.sweepfile import load_sweep
from perfmodel.errors import InputError
from perfmodel.policies import BATCHING, DISPATCH

FIXED = {"generator": "fixed", "params": {"input_tokens": 100, "output_tokens": 10}, "num_requests": 5, "rate_rps": 1}
SPLITTING = {"preset": "graphs", "splits_all_heads": True}
OWN = """
class Last:
    def choose(self, view, request):
        return view.num_instances - 1

class Nothing:
    pass
"""


def plan(**base):
    (run,) = load_sweep({"base": {"system": "vllm-multi", "workload": FIXED, **base}}).runs
    return plan_run(run.config)


def test_multi_fills_the_cluster_with_equal_instances():
    found = plan(cluster={"nodes": 2, "gpus_per_node": 8}, instance={"tensor_parallel": 4})
    assert found.spec.num_instances == 4
    assert found.spec.nodes == (0, 0, 1, 1)
    assert found.spec.num_blocks == found.spec.instance.num_blocks


def test_an_instance_over_two_nodes_counts_for_its_first():
    found = plan(cluster={"nodes": 4, "gpus_per_node": 8}, instance={"tensor_parallel": 16})
    assert found.spec.nodes == (0, 2)


@pytest.mark.parametrize(("model", "sizes"), [("llama2-7b", (32, 1)), ("llama2-13b", (8, 4)), ("llama2-70b", (32, 1))])
def test_single_takes_the_largest_tensor_parallel_times_stages(model, sizes):
    """13B: 40 heads and 40 layers on 32 GPUs leave 8 × 4."""
    instance = plan(system="vllm-single", model=model).spec.instance
    assert (instance.tensor_parallel, instance.pipeline_parallel) == sizes


def test_an_engine_that_splits_all_heads_is_charged_and_believed():
    spec, measured = (plan(system="vllm-single", engine=engine).spec for engine in (SPLITTING, "graphs"))
    for split, unsplit in ((spec.truth, measured.truth), (spec.belief, measured.belief)):
        assert split.decode_attention_s(1, 100_000) < 0.1 * unsplit.decode_attention_s(1, 100_000)


def test_capacity_counts_all_instances():
    found = plan(cluster={"nodes": 1, "gpus_per_node": 2}, instance={"blocks_per_gpu": 100})
    assert found.capacity.num_blocks == 200
    assert found.capacity.peak_flops_per_s == pytest.approx(2 * 312e12)
    assert found.pool_line() == "2 × TP1: pool 3,200 tokens, longest request 1,600"
    short = plan(cluster={"nodes": 1, "gpus_per_node": 2}, instance={"blocks_per_gpu": 6})
    assert short.pool_line().endswith("longest request 96, 5 of 5 requests are longer")


def test_names_are_those_of_the_registries():
    found = plan(dispatch="round-robin", batching="prefill-first")
    assert found.spec.dispatch is DISPATCH["round-robin"]
    assert found.spec.batching is BATCHING["prefill-first"]


def test_a_policy_of_a_file_is_loaded_and_its_hash_kept(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    found = plan(dispatch=f"{file}:Last")
    assert type(found.spec.dispatch()).__name__ == "Last"
    assert len(found.facts["inputs"][str(file)]) == 64
    file.write_text(OWN.replace("num_instances - 1", "num_instances - 2"))
    changed = plan(dispatch=f"{file}:Last")
    assert changed.facts["inputs"][str(file)] != found.facts["inputs"][str(file)]
    assert changed.spec.dispatch is not found.spec.dispatch


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mine.py:Lost", "unknown class of mine.py 'Lost'; did you mean 'Last'?"),
        ("mine.py:Nothing", "mine.py:Nothing has no method choose()"),
        ("nowhere.py:Last", "nowhere.py: no such file"),
        ("broken.py:Last", "broken.py:1: cannot be loaded: SyntaxError"),
        ("raising.py:Last", "raising.py: cannot be loaded: ZeroDivisionError"),
        ("least-load", "unknown dispatch policy 'least-load'; did you mean 'least-loaded'?"),
    ],
)
def test_policies_that_cannot_be_used_are_named(tmp_path, name, line):
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("class Last(:")
    (tmp_path / "raising.py").write_text("1 / 0")
    with pytest.raises(InputError) as error:
        plan(dispatch=str(tmp_path / name) if ".py" in name else name)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_closed_and_saturated_workloads_are_measured_by_finishes():
    closed = plan(workload={**FIXED, "rate_rps": None, "arrivals": "closed", "users": 2, "think_s": 1.0})
    assert closed.workload.users == 2 and len(closed.workload.think_s) == 5
    saturated = plan(workload={**FIXED, "rate_rps": None, "arrivals": "saturated"})
    assert saturated.workload.arrival_s.tolist() == [0.0] * 5
    kinds = [found.workload.window_kind for found in (closed, saturated, plan())]
    assert kinds == ["finishes", "finishes", "arrivals"]


def test_systems_share_requests_and_seeds_do_not():
    multi, single, other = plan(), plan(system="vllm-single"), plan(seed=1)
    assert multi.workload.arrival_s.tolist() == single.workload.arrival_s.tolist() != other.workload.arrival_s.tolist()


@pytest.mark.parametrize(
    ("base", "line"),
    [
        ({"model": "llama2-7"}, "unknown model 'llama2-7'; did you mean 'llama2-7b'"),
        ({"gpu": "a100"}, "unknown gpu 'a100'; did you mean 'a100-80gb'"),
        ({"gpu": {"preset": "a100-80gb", "memory": 1}}, "unknown gpu field 'memory'"),
        ({"instance": {"tensor_parallel": 3}}, "tensor_parallel"),
        ({"instance": {"tensor_parallel": 32}, "cluster": {"nodes": 3}}, "does not divide the cluster's 24 GPUs"),
        ({"model": "llama2-70b"}, "llama2-70b"),
        ({"workload": {"generator": "paper-9"}}, "unknown generator 'paper-9'"),
        ({"workload": {"trace": "own", "path": "nowhere.csv"}}, "nowhere.csv"),
        ({"workload": {"trace": "ownn", "path": __file__}}, "'ownn'; did you mean 'own'"),
        ({"truth": {"scale": {"attention": 2.0}}}, "unknown scale 'attention'"),
        ({"truth": {"pack": "none-such"}}, "none-such"),
    ],
)
def test_what_does_not_exist_or_fit_is_one_line(base, line):
    with pytest.raises(InputError) as error:
        plan(**base)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_of_a_config_json_is_an_input(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 1000,
        "torch_dtype": "float16",
    }
    file = tmp_path / "tiny" / "config.json"
    file.parent.mkdir()
    file.write_text(__import__("json").dumps(config))
    found = plan(model=str(file), cluster={"nodes": 1, "gpus_per_node": 1})
    assert list(found.facts["inputs"]) == [str(Path(file))]
    assert found.spec.instance.model.num_layers == 2
