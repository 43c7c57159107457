"""Progress of a sweep on stderr: a bar on a terminal, a line a run elsewhere."""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from experiments.sweepfile import Run


class Progress:
    """Context manager; `report` is what a sweep's loop calls when a run has ended."""

    def __init__(self, total: int, done: int = 0, what: str = "runs") -> None:
        self._console = Console(file=sys.stderr, highlight=False, markup=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(what, total=total, completed=done)
        self._total, self._done = total, done

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def report(self, run: Run, manifest: Mapping[str, Any]) -> None:
        self.step(run.name, ending(manifest))

    def step(self, name: str, text: str) -> None:
        """One more is done."""
        self._done += 1
        self._bar.update(self._task, completed=self._done, description=name)
        if not self._console.is_terminal:
            self._console.print(f"{self._done}/{self._total} {name}: {text}", soft_wrap=True)


def ending(manifest: Mapping[str, Any]) -> str:
    if manifest["status"] == "failed":
        return f"failed: {manifest['error']}"
    return f"done in {manifest['metrics']['wall_s']:.1f} s"
