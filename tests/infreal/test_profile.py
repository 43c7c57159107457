"""`infreal profile` → `infsim calibrate --from infreal` → a pack that prices this model, on a model of two small layers."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

import infsim
from experiments.calibrate import calibrate
from experiments.packs import load_pack
from infreal.profile import main
from infreal.profiling.check import BATCHES, cost_of, iteration_s
from infreal.profiling.model import Subject
from infreal.profiling.table import Took, repeat
from infreal.sources import load_model
from perfmodel.errors import InputError

pytestmark = pytest.mark.timeout(120)
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def arguments(folder):
    model, out = folder / "config.json", folder / "profile.csv"
    model.write_text(json.dumps(SHAPE))
    return ["--model", str(model), "--device", "cpu", "--pool-tokens", "2048", "--no-pair", "--out", str(out)]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    assert main(arguments(folder)) == 0
    return folder


def test_every_point_has_a_time_a_spread_and_repeats(profiled):
    table = pd.read_csv(profiled / "profile.csv")
    assert (table["time_s"] > 0).all() and (table["time_s_std"] >= 0).all() and (table["repeats"] >= 3).all()
    assert {"layer", "head", "host", "decode_attention", "prefill_attention", "serving", "iteration"} <= set(
        table["operator"]
    )
    assert not table.duplicated(["operator", "rows", "tokens", "context_tokens"]).any()


def test_a_call_may_say_how_long_its_part_took():
    assert set(repeat(lambda: Took(7.0), "cpu")) == {7.0}
    assert max(repeat(lambda: 7.0, "cpu")) < 1.0, "another answer is not a time"


def test_attention_and_the_rest_are_parts_of_one_forward_pass(profiled):
    decoder = load_model(str(profiled / "config.json"), None, "float32", "cpu")
    subject = Subject(decoder, "torch", 8192)
    seen = []
    subject.decoder = SimpleNamespace(
        device=decoder.device,
        config=decoder.config,
        local_attention=decoder.local_attention,
        forward=lambda batch, attend: seen.append(batch.num_tokens) or decoder.forward(batch, attend),
    )
    subject.decoder.logits, subject.decoder.dtype = decoder.logits, decoder.dtype
    attention, rest, head = subject.attention([(1, 4096)])(), subject.without_attention(5)(), subject.head(3)()
    assert seen == [1, 5, 1], "the head is measured behind a forward pass"
    assert all(isinstance(part, Took) and part > 0 for part in (attention, rest, head))


def test_queries_to_a_peer_cost_the_debtor_something(profiled):
    table = pd.read_csv(profiled / "profile.csv")
    [row] = table[table["operator"] == "exchange_overhead"].to_dict("records")
    assert row["time_s"] > 0 and row["rows"] == 4
    list(calibrate([f"infreal={profiled / 'profile.csv'}"], profiled / "exchange.json"))
    engine = cost_of(str(profiled / "config.json"), "float32", "cpu", profiled / "exchange.json").instance.engine
    assert engine.exchange_s_per_layer_per_peer == pytest.approx(row["time_s"], rel=1e-5)


def test_what_actors_cost_is_in_the_pack(profiled, tmp_path):
    """An iteration that has its core 80 % of the time takes 1.25 times as long, and a message 5 ms."""
    table = pd.read_csv(profiled / "profile.csv")
    times = {"message": 0.005, "actor_iterations": 1.0, "actor_iterations_core": 0.8}
    more = [table.iloc[0].to_dict() | {"operator": name, "time_s": time_s} for name, time_s in times.items()]
    pd.concat([table, pd.DataFrame(more)]).to_csv(tmp_path / "p.csv", index=False)
    list(calibrate([f"infreal={tmp_path / 'p.csv'}"], tmp_path / "pack.json"))
    engine = cost_of(str(profiled / "config.json"), "float32", "cpu", tmp_path / "pack.json").instance.engine
    assert (engine.background_frac, engine.message_s) == pytest.approx((0.2, 0.005))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_actors_are_measured_in_a_run_of_their_own(profiled, tmp_path):
    pytest.importorskip("ray")
    args = [argument for argument in arguments(tmp_path) if argument != "--no-pair"]
    assert main([*args, "--only-pair"]) == 0
    times = pd.read_csv(tmp_path / "profile.csv").set_index("operator")["time_s"]
    assert 0 < times["actor_iterations_core"] < times["actor_iterations"] and times["message"] > 0


def test_it_resumes_where_it_was_interrupted(profiled, tmp_path):
    whole = (profiled / "profile.csv").read_text().splitlines()
    args = arguments(tmp_path)
    (tmp_path / "profile.csv").write_text("\n".join([*whole[:-5], ""]))
    assert main(args) == 0
    again = (tmp_path / "profile.csv").read_text().splitlines()
    assert again[: len(whole) - 5] == whole[:-5], "nothing is measured twice"
    assert len(again) == len(whole)


def test_the_profile_of_another_model_is_not_continued(profiled, tmp_path, capsys):
    args = arguments(tmp_path)
    text = (profiled / "profile.csv").read_text()
    (tmp_path / "profile.csv").write_text(text.replace(",4,2,16,", ",8,2,16,"))
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 2
    assert "heads is 8, here it is 4" in capsys.readouterr().err
    (tmp_path / "profile.csv").write_text(text.replace(",4,2,16,", ",four,2,16,"))
    with pytest.raises(SystemExit):
        main(args)
    assert "line 2" in capsys.readouterr().err


def test_a_pack_of_it_prices_iterations_and_runs(profiled):
    pack = profiled / "pack.json"
    said = [str(line) for line in calibrate([f"infreal={profiled / 'profile.csv'}"], pack)]
    assert any("layer: " in line and "mean error" in line for line in said)
    assert set(load_pack(str(pack))["operators"]) == {"layer", "head", "decode_attention", "prefill_attention"}
    cost = cost_of(str(profiled / "config.json"), "float32", "cpu", pack)
    times = {name: iteration_s(cost, lengths) for name, lengths in BATCHES.items()}
    assert all(0 < seconds < float("inf") for seconds in times.values())
    table = pd.read_csv(profiled / "profile.csv")
    layer = table[(table["operator"] == "layer") & (table["tokens"] == 16)]["time_s"].item()
    assert cost.layer_s(16) == pytest.approx(layer, rel=1e-5)
    runs = infsim.run(
        {
            "base": {
                "system": "infinite-llm",
                "model": str(profiled / "config.json"),
                "gpu": "cpu",
                "cluster": {"nodes": 1, "gpus_per_node": 2, "intra_link": "loopback", "inter_link": "loopback"},
                "instance": {"blocks_per_gpu": 64},
                "truth": {"pack": str(pack)},
                "belief": {"pack": str(pack)},
                "workload": {"generator": "paper-0", "num_requests": 4, "rate_rps": 10.0},
            }
        }
    )
    assert runs.summary["num_finished"].item() + runs.summary["num_rejected"].item() == 4


def test_the_check_sets_measured_iterations_beside_priced_ones(profiled, capsys):
    pack = profiled / "checked.json"
    list(calibrate([f"infreal={profiled / 'profile.csv'}"], pack))
    args = arguments(profiled)
    args[args.index("--pool-tokens") + 1] = "16384"
    assert main([*args, "--check", str(pack)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["batch", "measured", "priced", "error"]
    assert [line[:48].strip() for line in lines] == list(BATCHES)
    assert all(line.endswith("%") for line in lines)


def test_an_unfinished_profile_is_one_line(profiled, tmp_path):
    table = pd.read_csv(profiled / "profile.csv")
    table[table["operator"] != "head"].to_csv(tmp_path / "p.csv", index=False)
    with pytest.raises(InputError, match="no rows of head"):
        list(calibrate([f"infreal={tmp_path / 'p.csv'}"], tmp_path / "pack.json"))
    with pytest.raises(InputError, match="stands alone"):
        source = f"infreal={profiled / 'profile.csv'}"
        list(calibrate([source, source], tmp_path / "pack.json"))
