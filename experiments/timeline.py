"""Timeline: what every instance was busy with, for Perfetto (Chrome trace format)."""

import json
from pathlib import Path
from typing import Any

from perfmodel.messages import Address, Command, Event, StartIterations, machine_name


class Timeline:
    """Observer that keeps a span per step."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._instances: set[Address] = set()

    def event(self, t_s: float, machine: Address, event: Event) -> None:
        """Not shown."""

    def command(self, t_s: float, machine: Address, command: Command) -> None:
        """Not shown."""

    def note(self, t_s: float, what: str, **values: Any) -> None:
        """Not shown."""

    def span(self, machine: Address, start_s: float, end_s: float, step: StartIterations) -> None:
        self._instances.add(machine)
        prompt_tokens = sum(chunk.tokens for chunk in step.chunks)
        self._events.append(
            {
                "name": _name(step.decode_rows, prompt_tokens),
                "ph": "X",
                "ts": start_s * 1e6,
                "dur": (end_s - start_s) * 1e6,
                "pid": 0,
                "tid": machine,
                "args": {
                    "decode_rows": step.decode_rows,
                    "context_tokens": step.decode_context_tokens,
                    "prompt_tokens": prompt_tokens,
                    "requests": [chunk.req_id for chunk in step.chunks],
                },
            }
        )

    def write(self, path: Path) -> None:
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": machine_name(i)}}
            for i in sorted(self._instances)
        ]
        path.write_text(json.dumps({"traceEvents": names + self._events, "displayTimeUnit": "ms"}))


def _name(decode_rows: int, prompt_tokens: int) -> str:
    parts = [f"prefill {prompt_tokens}"] * bool(prompt_tokens) + [f"decode {decode_rows}"] * bool(decode_rows)
    return " + ".join(parts)
