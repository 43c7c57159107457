"""A progress bar over the bytes of a large file, on a terminal only."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from traces.files import TraceFile

SHOW_FROM_BYTES = 1 << 25


@contextmanager
def progress_over(file: TraceFile) -> Iterator[None]:
    """While the block runs, reading `file` moves a bar on stderr, if the file is large and someone is watching."""
    if file.num_bytes < SHOW_FROM_BYTES or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(file.path.name, total=file.num_bytes)
        file.advance = lambda count: bar.advance(task, count)
        yield
