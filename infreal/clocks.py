"""The clocks of a real run: seconds since it began. Drivers take one, so that tests can step through time."""

import time
from typing import Protocol


class Clock(Protocol):
    """`wait_until` returns at that time, where it has not passed."""

    def now_s(self) -> float: ...
    def wait_until(self, time_s: float) -> None: ...


class WallClock:
    """The machine's monotonic clock. `skips_idle`: nobody sleeps; idle time is jumped over and counts as passed."""

    def __init__(self, skips_idle: bool = False) -> None:
        self._skips_idle = skips_idle
        self._zero_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._zero_s

    def wait_until(self, time_s: float) -> None:
        idle_s = max(0.0, time_s - self.now_s())
        if self._skips_idle:
            self._zero_s -= idle_s
        else:
            time.sleep(idle_s)


class SteppedClock:
    """Moves on by `tick_s` at each reading: the same run takes the same time on every machine."""

    def __init__(self, tick_s: float = 1e-3) -> None:
        self._tick_s, self._now_s = tick_s, 0.0

    def now_s(self) -> float:
        self._now_s += self._tick_s
        return self._now_s

    def wait_until(self, time_s: float) -> None:
        self._now_s = max(self._now_s, time_s)
