"""Timeline: what every instance was busy with, for Perfetto (the trace event format in JSON, times in microseconds).

A process an instance: its steps as slices; as asynchronous slices the attention that it computes for others and the transfers
that it starts. A flow a request: from the slice that computes its first prompt tokens to the one that gives its last token.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from perfmodel.messages import (
    Address,
    Command,
    Event,
    IterationsDone,
    StartFetch,
    StartIterations,
    StartTransfer,
    TransferDone,
    TransferId,
    machine_name,
)

ITERATIONS_TID = 1
Slice = dict[str, Any]


class Timeline:
    """Observer that keeps steps, remote attention, transfers and the way of requests."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._last_us = 0.0
        self._iterations: dict[Address, int] = defaultdict(int)  # of the step in progress, reported so far
        self._ended: dict[Address, Slice] = {}  # a step whose last report is still to come
        self._transfers: dict[TransferId, Slice] = {}  # open ones
        self._ways: dict[int, list[Slice]] = defaultdict(list)  # request → slices that it is led through
        self._num_reads = 0

    # ---- looking on ----------------------------------------------------------------------------------------------------------
    def event(self, t_s: float, machine: Address, event: Event) -> None:
        if isinstance(event, IterationsDone):
            self._report(machine, event)
        elif isinstance(event, TransferDone) and machine == event.transfer.debtor:
            self._end_transfer(event.transfer, 1e6 * t_s, event.ok)

    def command(self, t_s: float, machine: Address, command: Command) -> None:
        if isinstance(command, StartTransfer | StartFetch):
            way = f"to {machine_name(command.peer)}"
            if isinstance(command, StartFetch):
                way = f"back from {machine_name(command.peer)}"
            identity = ".".join(map(str, command.transfer))
            begin = _async("transfer", f"KV {way}", identity, machine, 1e6 * t_s, blocks=len(command.blocks))
            self._transfers[command.transfer] = begin
            self._add(begin)

    def note(self, t_s: float, what: str, **values: Any) -> None:
        """Not shown."""

    def span(self, machine: Address, start_s: float, end_s: float, step: StartIterations) -> None:
        prompt_tokens = sum(chunk.tokens for chunk in step.chunks)
        shown = {
            "name": _name(step.decode_rows, prompt_tokens),
            "cat": "iterations",
            "ph": "X",
            "ts": 1e6 * start_s,
            "dur": 1e6 * (end_s - start_s),
            "pid": _pid(machine),
            "tid": ITERATIONS_TID,
            "args": {
                "decode_rows": step.decode_rows,
                "context_tokens": step.decode_context_tokens,
                "prompt_tokens": prompt_tokens,
                "requests": [chunk.req_id for chunk in step.chunks],
            },
        }
        self._add(shown)
        self._ended[machine] = shown
        for req_id in dict.fromkeys([*(chunk.req_id for chunk in step.chunks), *step.joined]):
            self._ways[req_id].append(shown)
        self._add_reads(machine, 1e6 * start_s, 1e6 * end_s, step)

    # ---- what it makes of it -------------------------------------------------------------------------------------------------
    def _report(self, machine: Address, done: IterationsDone) -> None:
        """Reports of a step's iterations; its slice is there before the last of them."""
        self._iterations[machine] += done.num_iterations
        if not done.ended:
            return
        shown, iterations = self._ended.pop(machine, None), self._iterations.pop(machine)
        if shown is not None:  # None: broken off, and not shown
            shown["args"]["iterations"] = iterations
            for req_id in done.finished_ids:
                if self._ways[req_id][-1] is not shown:
                    self._ways[req_id].append(shown)

    def _add_reads(self, debtor: Address, start_us: float, end_us: float, step: StartIterations) -> None:
        """Attention for a step, at every creditor that it reads from, for as long as the step lasts."""
        for what, reads in (("decode", step.remote), ("prefill", step.chunk_remote)):
            for read in reads:
                self._num_reads += 1
                title = f"{what} attention for {machine_name(debtor)}"
                values = {"rows": read.rows, "tokens": read.tokens}
                begin = _async("remote attention", title, f"{self._num_reads}", read.peer, start_us, **values)
                self._add(begin)
                self._add(_end_of(begin, end_us))

    def _end_transfer(self, transfer: TransferId, end_us: float, ok: bool) -> None:
        begin = self._transfers.pop(transfer, None)
        if begin is not None:
            self._add(_end_of(begin, end_us, ok=ok))

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        self._last_us = max(self._last_us, event["ts"] + event.get("dur", 0.0))

    def write(self, path: Path) -> None:
        """Names first, then everything in order of time; what never ended ends with the run."""
        for transfer in list(self._transfers):
            self._end_transfer(transfer, self._last_us, ok=False)
        events = self._events + [event for req_id, way in self._ways.items() for event in _flow(req_id, way)]
        events.sort(key=lambda event: event["ts"])
        names = [name for pid in sorted({event["pid"] for event in events}) for name in _names(pid)]
        path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _pid(machine: Address) -> int:
    return machine + 1  # 0 is the idle process


def _names(pid: int) -> list[dict[str, Any]]:
    """Metadata: how a process and its thread of iterations are called."""
    name = {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": machine_name(pid - 1)}}
    order = {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    thread = {"name": "thread_name", "ph": "M", "pid": pid, "tid": ITERATIONS_TID, "args": {"name": "iterations"}}
    return [name, order, thread]


def _async(kind: str, name: str, identity: str, machine: Address, ts_us: float, **values: Any) -> Slice:
    """The beginning of an asynchronous slice; those of one process may overlap."""
    place = {"pid": _pid(machine), "tid": ITERATIONS_TID}
    return {"name": name, "cat": kind, "ph": "b", "id": identity, "ts": ts_us, **place, "args": values}


def _end_of(begin: Slice, ts_us: float, **values: Any) -> Slice:
    return {**begin, "ph": "e", "ts": ts_us, "args": values}


def _flow(req_id: int, way: list[Slice]) -> list[dict[str, Any]]:
    """Arrows through the middle of every slice on a request's way; none where it stays in one."""
    phases = ["s", *"t" * (len(way) - 2), "f"] if len(way) > 1 else []
    return [
        {
            "name": f"request {req_id}",
            "cat": "request",
            "ph": phase,
            "id": req_id,
            "ts": shown["ts"] + shown["dur"] / 2,
            "pid": shown["pid"],
            "tid": shown["tid"],
        }
        | ({"bp": "e"} if phase == "f" else {})
        for phase, shown in zip(phases, way, strict=False)
    ]


def _name(decode_rows: int, prompt_tokens: int) -> str:
    parts = [f"prefill {prompt_tokens}"] * bool(prompt_tokens) + [f"decode {decode_rows}"] * bool(decode_rows)
    return " + ".join(parts)
