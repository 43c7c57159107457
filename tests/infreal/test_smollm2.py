"""A real model end to end: SmolLM2-135M from its package, over instances too small for its prompts. Skipped where it is not."""

import numpy as np
import pytest
from pool_tools import Checked, Restless, cluster, workload

from experiments.catalogue import load_model
from infreal import demo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def run_of(spec, decoder, prompts, num_new):
    return Checked(spec, workload([(len(ids), num_new) for ids in prompts]), decoder, prompts=prompts.__getitem__)


def pool_of(num_instances, num_blocks, **changes):
    return cluster(num_instances, num_blocks, load_model("smollm2-135m", "float32"), **changes)


@pytest.mark.parametrize("num_instances", [1, 2, 3, 4])
def test_a_prompt_over_several_instances_gives_the_text_of_one(smollm2, num_instances):
    tokenizer, decoder = smollm2
    ids = tokenizer.encode(demo.PROMPT)
    num_blocks = -(-(len(ids) + 24) // (4 * num_instances)) + 2
    run = run_of(pool_of(num_instances, num_blocks, token_budget=32), decoder, [ids], 20).finish()
    run.assert_exact()
    assert tokenizer.decode(run.run.outputs[0]).startswith(" Paris.")
    assert run.result.requests["remote_tokens_max"][0] >= len(ids) * (num_instances - 1) // num_instances - 16


def test_moves_preemption_and_blocks_asked_back(smollm2):
    tokenizer, decoder = smollm2
    ids = tokenizer.encode(demo.PROMPT)
    draw = np.random.default_rng(0)
    prompts = [ids, *(draw.integers(49152, size=n).tolist() for n in (20, 45, 33))]
    run = run_of(pool_of(3, 30, placement=Restless), decoder, prompts, 24)
    for i in range(6):
        run.at(0.4 + 0.3 * i, Checked.ask_back, i % 3)
    run.finish().assert_exact()
    assert run.count("throughput") > 0


@pytest.mark.parametrize("arguments", [[], pytest.param(["--ray"], marks=pytest.mark.xdist_group("ray"))])
def test_the_demo_prints_the_same_text_twice_and_who_lent_what(smollm2, capsys, arguments):
    assert demo.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count(" Paris.") == 2
    assert "\nthe same text\n" in printed
    lenders = {line.split()[2] for line in printed.splitlines() if " lends instance-0 " in line and "committed" in line}
    assert lenders == {"instance-1", "instance-2"}
