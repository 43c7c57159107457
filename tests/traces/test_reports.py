"""Public reports that concern workloads, each with the small input that shows it."""

import subprocess
import sys

import numpy as np
import pytest

import traces
from perfmodel.errors import InputError
from traces import GenerateOptions, LoadOptions

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_inference_perf_782_times_are_not_cut_to_10_ms(write):
    """Requests at 1, 2, 9 and 11 ms became one burst at [0, 0, 0, 0.01]."""
    rows = "".join(f"2023-11-16 18:15:46.{text},5,5\n" for text in ("0010000", "0020000", "0090000", "0110000"))
    trace = traces.load("azure-2023", write(AZURE + rows))
    assert trace.arrival_s == pytest.approx([0.0, 0.001, 0.008, 0.010], abs=1e-9)


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_burstgpt_11_failed_requests_are_counted_not_served(write):
    """Failures are rows with 0 response tokens."""
    rows = "5,ChatGPT,472,18,490,API log\n6,ChatGPT,99,0,99,API log\n7,GPT-4,10,9,19,API log\n"
    trace = traces.load("burstgpt", write(BURST + rows))
    assert trace.output_tokens.tolist() == [18, 9]
    assert trace.account.line() == "3 rows read = 2 kept + 1 dropped (zero_output 1)"


def test_burstgpt_2_the_ramp_is_named_and_whole_seconds_are_jittered(write):
    """The head is far slower than the rest, and times are whole seconds: several requests at one instant."""
    head = "".join(f"{100 * k},ChatGPT,5,5,10,API log\n" for k in range(5))
    steady = "".join(f"{1000 + k // 4},ChatGPT,5,5,10,API log\n" for k in range(400))
    path = write(BURST + head + steady)
    whole = traces.load("burstgpt", path)
    assert any("ramp" in note for note in whole.account.notes)
    cut = traces.load("burstgpt", path, LoadOptions(window_s=(1000, 1100), jitter=True))
    assert len(cut) == 400
    assert cut.mean_rate_rps == pytest.approx(4.0, rel=0.02)
    assert len(np.unique(cut.arrival_s)) == 400
    assert "arrivals lie on a 1 s grid: jittered within it, seed 0" in cut.account.notes
    assert not any("ramp" in note for note in cut.account.notes)


def test_vllm_39795_mooncake_times_are_ms_and_blocks_512_tokens(write):
    """Times were taken for seconds and blocks for 16 tokens."""
    rows = (
        '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0,1,2,3,4,5,6,7,8,9,10,11,12,13]}\n'
        '{"timestamp": 3000, "input_length": 512, "output_length": 9, "hash_ids": [0]}\n'
    )
    trace = traces.load("mooncake", write(rows))
    assert trace.arrival_s.tolist() == [0.0, 3.0]
    assert trace.block_tokens == 512
    in_blocks_of_16 = '{"timestamp": 0, "input_length": 32, "output_length": 9, "hash_ids": [0, 1]}\n'
    with pytest.raises(InputError, match="2 blocks of 512 tokens do not cover an input of 32 tokens, 1 do"):
        traces.load("mooncake", write(in_blocks_of_16))


def test_vllm_21104_evalscope_1367_arrivals_are_absolute_and_do_not_drift():
    """Sleeping gap after gap let the offered rate fall behind; deadlines counted from the start do not."""
    options = GenerateOptions(num_requests=200_000, rate_rps=1000.0, params={"input_tokens": 1, "output_tokens": 1})
    trace = traces.generate("fixed", options)
    exact = np.cumsum(np.diff(trace.arrival_s, prepend=0.0).astype(np.longdouble))
    assert float(np.abs(trace.arrival_s - exact).max()) < 1e-9
    assert trace.mean_rate_rps == pytest.approx(1000.0, rel=0.01)


def test_vllm_54783_long_prompts_and_later_turns_are_not_lost(write, word_tokenizer):
    """Only the first turn was read, and prompts over 1,024 tokens vanished."""
    import json

    turns = [{"from": "human", "value": "word " * 1500}, {"from": "gpt", "value": "answer " * 30}] * 3
    path = write(json.dumps([{"id": "long", "conversations": turns}]))
    trace = traces.load("sharegpt", path, LoadOptions(tokenizer=str(word_tokenizer)))
    assert trace.input_tokens.tolist() == [1500, 3030, 4560]
    assert trace.output_tokens.tolist() == [30, 30, 30]
    limit = LoadOptions(tokenizer=str(word_tokenizer), max_context_tokens=2048)
    with pytest.raises(InputError, match=r"3030 \+ 30 tokens are more than max_context_tokens 2048 \(2 such rows"):
        traces.load("sharegpt", path, limit)


def test_inference_sim_1615_replay_of_an_export_is_the_same_workload(tmp_path):
    """A run of 200 requests, exported and replayed, completed 130."""
    trace = traces.generate("empirical-azure-conv", GenerateOptions(num_requests=200, rate_rps=20.0, seed=42))
    traces.write_own(trace, tmp_path / "export.csv")
    again = traces.load("own", tmp_path / "export.csv")
    assert len(again) == 200
    for column in ("arrival_s", "input_tokens", "output_tokens", "ids"):
        assert getattr(trace, column).tobytes() == getattr(again, column).tobytes(), column


def test_lmdeploy_4784_vllm_28512_the_seed_rules_every_draw():
    """A part of the lengths came from a global generator that --seed did not reach: two processes, two workloads."""
    program = (
        "import numpy, random, sys, hashlib, traces\n"
        "numpy.random.seed(int(sys.argv[1])); random.seed(int(sys.argv[1]))\n"
        "digest = hashlib.sha256()\n"
        "for name in ('paper-3', 'empirical-mooncake-conversation'):\n"
        "    options = traces.GenerateOptions(num_requests=300, rate_rps=2.0, seed=7)\n"
        "    trace = traces.generate(name, options)\n"
        "    for column in (trace.arrival_s, trace.input_tokens, trace.output_tokens): digest.update(column.tobytes())\n"
        "print(digest.hexdigest())\n"
    )
    commands = [[sys.executable, "-c", program, noise] for noise in "12"]
    runs = [subprocess.run(command, capture_output=True, text=True, check=False) for command in commands]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
