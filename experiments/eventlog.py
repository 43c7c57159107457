"""Event logs: `events.jsonl`, and a run rebuilt from one.

The first line holds the resolved configuration and what carried it out. Every other line is `{"t_s", "machine", "event", …}`:
what a machine heard, in order, or what the driver noted (`machine` "driver"). Fed to fresh machines, a log gives the same
commands, whichever driver wrote it.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from perfmodel import messages, view
from perfmodel.cluster import ClusterSpec, Machines, build_machines
from perfmodel.errors import InputError
from perfmodel.messages import (
    Address,
    Command,
    Event,
    Finish,
    RecordMove,
    RequestArrived,
    StartIterations,
    machine_name,
)
from perfmodel.records import Collector, Counters, RunResult, total

FORMAT = "infsim-events-1"
Watch = Callable[[float, Address, Event, list[Command]], None]


def encode(value: Any) -> Any:
    """A message as JSON: dataclasses and named tuples become objects with their class name in "type"."""
    named_tuple = getattr(value, "_fields", None)
    if named_tuple or dataclasses.is_dataclass(value):
        names = named_tuple or [f.name for f in dataclasses.fields(value)]
        return {"type": type(value).__name__, **{name: encode(getattr(value, name)) for name in names}}
    return [encode(v) for v in value] if isinstance(value, tuple) else value


def decode(value: Any) -> Any:
    """Inverse of `encode`."""
    if isinstance(value, dict):
        kind = getattr(messages, value["type"], None) or getattr(view, value["type"])
        return kind(**{name: decode(v) for name, v in value.items() if name != "type"})
    return tuple(decode(v) for v in value) if isinstance(value, list) else value


class EventLog:
    """Observer that writes a log line by line. facts: what a manifest says of the driver and its hardware."""

    def __init__(self, file: TextIO, config: dict[str, Any], facts: dict[str, Any] | None = None) -> None:
        self._file = file
        self._write({"format": FORMAT, "config": config, "facts": facts or {}})

    def event(self, t_s: float, machine: Address, event: Event) -> None:
        line = encode(event)
        self._write({"t_s": t_s, "machine": machine_name(machine), "event": line.pop("type"), **line})

    def command(self, t_s: float, machine: Address, command: Command) -> None:
        """Commands follow from events; they are not written."""

    def span(self, machine: Address, start_s: float, end_s: float, step: StartIterations) -> None:
        """Follows from events."""

    def note(self, t_s: float, what: str, **values: Any) -> None:
        self._write({"t_s": t_s, "machine": "driver", "event": what, **values})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_log(path: Path) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """(header with `config` and `facts`, lines). Raises InputError for what is no event log."""
    try:
        lines = _lines(path)
        header = next(lines, {})
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    if header.get("format") != FORMAT:
        raise InputError(f"{path}, line 1: not an event log (allowed: a header with format {FORMAT!r})")
    return {"facts": {}, **header}, lines


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if not isinstance(line, dict):
                raise InputError(f"{path}, line {number}: not a JSON object")
            yield line


class Replay:
    """Feeds a log to fresh machines and collects what they command. watch(time, machine, event, its commands): sees all of it."""

    def __init__(self, spec: ClusterSpec, watch: Watch | None = None) -> None:
        self._watch = watch
        self.machines: Machines = build_machines(spec)
        self.commands: list[tuple[float, Address, Command]] = []
        self._by_name = {machine_name(address): address for address in self.machines.addresses()}
        self._collector = Collector(marks={"start": Counters()})
        self._arrivals: dict[int, tuple[float, int]] = {}
        self._asked: dict[int, int] = {}
        self._end: dict[str, Any] = {"basis_s": {}, "window_kind": "arrivals"}

    def run(self, lines: Iterable[dict[str, Any]]) -> RunResult:
        for line in lines:
            fields = {k: v for k, v in line.items() if k not in ("t_s", "machine", "event")}
            if line["machine"] == "driver":
                self._note(line["t_s"], line["event"], fields)
            else:
                event = decode({"type": line["event"], **fields})
                self._handle(line["t_s"], self._by_name[line["machine"]], event)
        return self._collector.result(self._end["window_kind"], self._end["basis_s"])

    def _handle(self, t_s: float, machine: Address, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._arrivals[event.request.req_id] = (t_s, event.request.input_tokens)
        commands = self.machines[machine].handle(event, t_s)
        if self._watch:
            self._watch(t_s, machine, event, commands)
        for command in commands:
            self.commands.append((t_s, machine, command))
            if isinstance(command, RecordMove):
                self._collector.add_move(command, self.machines.spec.instance.block_bytes)
            if isinstance(command, Finish):
                outcome = command.outcome
                asked = self._asked.get(outcome.req_id, outcome.output_tokens)
                self._collector.add_request(outcome, *self._arrivals[outcome.req_id], asked)

    def _note(self, t_s: float, what: str, fields: dict[str, Any]) -> None:
        if what == "asked":
            self._asked[fields["req_id"]] = fields["output_tokens"]
        elif what == "mark":
            counters = [manager.counters for manager in self.machines.rmanagers]
            self._collector.marks[fields["name"]] = total(counters, t_s)
        elif what == "sample":
            for instance, manager in enumerate(self.machines.rmanagers):
                self._collector.add_sample(t_s, instance, manager.sample())
        elif what == "return":
            self.machines.restart(self._by_name[fields["who"]], t_s)
        elif what == "end":
            self._end = fields
