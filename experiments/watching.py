"""What a run leaves beside its tables: observers for what was asked for, and their files."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from experiments.eventlog import EventLog
from experiments.plan import RunPlan
from experiments.sweep import Recording
from experiments.timeline import Timeline
from perfmodel.journal import Observer, Together


@contextmanager
def watching(plan: RunPlan, folder: Path, recording: Recording) -> Iterator[Observer | None]:
    """The observer of a run: events.jsonl and timeline.json go into `folder`. None where nothing was asked for."""
    with ExitStack() as files:
        observers: list[Observer] = []
        if recording.events:
            file = files.enter_context((folder / "events.jsonl").open("w", encoding="utf-8"))
            observers.append(EventLog(file, plan.config.model_dump(mode="json"), carried_out_by(plan)))
        timeline = Timeline()
        if recording.timeline:
            observers.append(timeline)
        yield Together(observers) if observers else None
    if recording.timeline:
        timeline.write(folder / "timeline.json")


def carried_out_by(plan: RunPlan) -> dict[str, object]:
    """What a replay cannot find out: whether the run was simulated, and on what it ran."""
    return {name: plan.facts[name] for name in ("driver", "hardware") if name in plan.facts}
