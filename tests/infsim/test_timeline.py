"""timeline.json against the rules of the trace event format ("Trace Event Format", Google, public), as far as it is used here."""

import json
import math
from collections import defaultdict
from itertools import pairwise

import pytest

from infsim.__main__ import main

# One prompt needs the room of both instances; short ones run beside it.
CONFIG = """
base:
  system: infinite-llm
  model: llama2-7b
  cluster: {nodes: 2, gpus_per_node: 1}
  instance: {blocks_per_gpu: 100}
  dispatch: round-robin
  workload: {trace: own, path: requests.csv}
"""
REQUESTS = """arrival_s,input_tokens,output_tokens,id
0.0,2048,128,0
0.0,64,128,1
0.0,64,64,2
0.5,64,64,3
2.0,64,1,4
"""
REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "b": {"name", "cat", "ts", "pid", "tid", "id"},
    "e": {"name", "cat", "ts", "pid", "tid", "id"},
    "s": {"name", "cat", "ts", "pid", "tid", "id"},
    "t": {"name", "cat", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ts", "pid", "tid", "id", "bp"},
    "M": {"name", "pid", "tid", "args"},
}
METADATA = {"process_name": str, "process_sort_index": int, "thread_name": str}
ARGUMENT = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
ROUNDING_US = 1e-3


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The events of a run in which loans are made for prefill and decode."""
    folder = tmp_path_factory.mktemp("timeline")
    (folder / "sweep.yaml").write_text(CONFIG)
    (folder / "requests.csv").write_text(REQUESTS)
    arguments = ["run", folder / "sweep.yaml", "--out", folder / "out", "--timeline", "--workers", 1]
    assert main([str(argument) for argument in arguments]) == 0
    (path,) = (folder / "out").glob("runs/*/timeline.json")
    whole = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert set(whole) == {"traceEvents", "displayTimeUnit"} and whole["displayTimeUnit"] in ("ms", "ns")
    return whole["traceEvents"]


def of(trace, *phases):
    return [event for event in trace if event["ph"] in phases]


def test_every_event_has_what_its_phase_requires(trace):
    for event in trace:
        assert event["ph"] in REQUIRED and REQUIRED[event["ph"]] <= set(event), event
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int and event["pid"] > 0
        assert isinstance(event.get("args", {}), dict)
        times = [event[key] for key in ("ts", "dur") if key in event]
        assert all(math.isfinite(time_us) and time_us >= 0 for time_us in times)
    assert all(isinstance(event["id"], str | int) for event in of(trace, "b", "e", "s", "t", "f"))


def test_names_come_first_and_the_rest_in_order_of_time(trace):
    count = len(of(trace, "M"))
    assert of(trace[:count], "M") == trace[:count]
    times = [event["ts"] for event in trace[count:]]
    assert times == sorted(times)


def test_every_instance_is_a_named_process_with_a_named_track_of_iterations(trace):
    for event in of(trace, "M"):
        assert set(event["args"]) == {ARGUMENT[event["name"]]}
        assert isinstance(event["args"][ARGUMENT[event["name"]]], METADATA[event["name"]])
    names = {event["pid"]: event["args"]["name"] for event in of(trace, "M") if event["name"] == "process_name"}
    tracks = {(event["pid"], event["tid"]) for event in of(trace, "M") if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["instance-0", "instance-1"]
    assert {event["pid"] for event in of(trace, "X", "b", "e", "s", "t", "f")} == set(names)
    assert {(event["pid"], event["tid"]) for event in of(trace, "X")} == tracks


def test_slices_of_a_track_do_not_overlap_and_count_their_iterations(trace):
    tracks = defaultdict(list)
    for event in of(trace, "X"):
        tracks[event["pid"], event["tid"]].append(event)
        assert event["args"]["iterations"] >= 1
    for slices in tracks.values():
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + ROUNDING_US


def test_asynchronous_slices_begin_and_end_once_on_one_process(trace):
    pairs = defaultdict(list)
    for event in of(trace, "b", "e"):
        pairs[event["cat"], event["id"]].append(event)
    for begin, end in pairs.values():
        assert (begin["ph"], end["ph"]) == ("b", "e")
        assert (begin["name"], begin["pid"]) == (end["name"], end["pid"])
    assert {kind for kind, _ in pairs} == {"remote attention", "transfer"}


def test_flows_start_and_finish_once_inside_slices(trace):
    flows = defaultdict(list)
    for event in of(trace, "s", "t", "f"):
        flows[event["cat"], event["id"]].append(event)
        assert any(
            (one["pid"], one["tid"]) == (event["pid"], event["tid"])
            and one["ts"] <= event["ts"] <= one["ts"] + one["dur"]
            for one in of(trace, "X")
        ), event
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", *"t" * (len(flow) - 2), "f"]
        assert flow[-1]["bp"] == "e"
    assert {req_id for _, req_id in flows} == {
        0,
        1,
        2,
        3,
    }  # the last one gives its only token in the step of its prompt


def test_remote_attention_is_shown_at_the_creditor_while_its_debtor_iterates(trace):
    steps = {(event["ts"], event["pid"]) for event in of(trace, "X")}
    pid = {f"instance-{i}": i + 1 for i in range(2)}
    reads = [event for event in of(trace, "b") if event["cat"] == "remote attention"]
    for event in reads:
        debtor = pid[event["name"].rpartition(" for ")[2]]
        assert event["pid"] != debtor and (event["ts"], debtor) in steps
        assert event["args"]["rows"] >= 1 and event["args"]["tokens"] >= 1
    assert {event["name"].partition(" ")[0] for event in reads} == {"decode", "prefill"}
