"""What the sweep loop calls for one run: the simulation, watched as far as was asked for."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from experiments.plan import RunPlan
from experiments.sweep import Recording
from infsim.driver import Observer
from infsim.eventlog import EventLog
from infsim.simulate import simulate
from infsim.timeline import Timeline
from perfmodel.messages import Address, Command, Event, StartIterations
from perfmodel.records import RunResult


def run_one(plan: RunPlan, folder: Path, recording: Recording) -> RunResult:
    """Simulate a plan; events.jsonl and timeline.json go into `folder`."""
    with ExitStack() as files:
        observers: list[Observer] = []
        if recording.events:
            file = files.enter_context((folder / "events.jsonl").open("w", encoding="utf-8"))
            observers.append(EventLog(file, plan.config.model_dump(mode="json")))
        timeline = Timeline()
        if recording.timeline:
            observers.append(timeline)
        result = simulate(plan.spec, plan.workload, Together(observers) if observers else None)
    if recording.timeline:
        timeline.write(folder / "timeline.json")
    return result


class Together:
    """Several observers as one."""

    def __init__(self, observers: list[Observer]) -> None:
        self._observers = observers

    def event(self, t_s: float, machine: Address, event: Event) -> None:
        for observer in self._observers:
            observer.event(t_s, machine, event)

    def command(self, t_s: float, machine: Address, command: Command) -> None:
        for observer in self._observers:
            observer.command(t_s, machine, command)

    def span(self, machine: Address, start_s: float, end_s: float, step: StartIterations) -> None:
        for observer in self._observers:
            observer.span(machine, start_s, end_s, step)

    def note(self, t_s: float, what: str, **values: Any) -> None:
        for observer in self._observers:
            observer.note(t_s, what, **values)
