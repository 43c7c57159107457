"""StepTime: when the iterations of one step end, in closed form.

Iteration j of a fixed decode batch takes max over lines (intercept + slope · j) seconds: attention is affine in the context,
which grows by one token a row; floors, launches and waits for other instances are constant. Where a line bends down, the lower
of two counts. The sum of n iterations is then a sum over the segments of that envelope, so a step of a thousand iterations costs
as much to price as one.
"""

from collections.abc import Sequence
from math import inf, sqrt

Line = tuple[float, float]  # (intercept in seconds, slope in seconds per iteration ≥ 0)
Bend = tuple[Line, Line]  # the steeper one first


class StepTime:
    """Durations of iterations 0, 1, 2, … of a step: `offset_s` + max over `lines` and over the lower lines of `bends`."""

    __slots__ = ("_segments", "offset_s")

    def __init__(self, offset_s: float, lines: Sequence[Line], bends: Sequence[Bend] = (), limit: float = inf) -> None:
        self.offset_s = offset_s
        self._segments = _bent_envelope(lines, bends, limit) if bends else _envelope(lines, limit)

    def duration_s(self, j: int) -> float:
        """Seconds of iteration `j` alone."""
        for segment in reversed(self._segments):
            if j >= segment[0]:
                return self.offset_s + segment[1] + segment[2] * j
        raise AssertionError(j)

    def total_s(self, iterations: int) -> float:
        """Seconds from the start to the end of iteration `iterations` − 1."""
        total = 0.0
        segments = self._segments
        for i, (first, intercept, slope) in enumerate(segments):
            end = segments[i + 1][0] if i + 1 < len(segments) else iterations
            n = min(end, iterations) - first
            if n <= 0:
                break
            total += n * (self.offset_s + intercept + slope * (first + (n - 1) / 2))
        return total

    def completed(self, elapsed_s: float, limit: int) -> int:
        """Iterations complete `elapsed_s` after the start, at most `limit`."""
        done, before, base, growth = 0, 0.0, 0.0, 0.0
        for i, (first, intercept, slope) in enumerate(self._segments):
            at_first = self.total_s(first) if i else 0.0
            if i and at_first > elapsed_s:
                break
            done, before = first, at_first
            base, growth = self.offset_s + intercept + slope * first, slope
        count = done + _solve(elapsed_s - before, base, growth)
        while count < limit and self.total_s(count + 1) <= elapsed_s:
            count += 1
        while count > 0 and self.total_s(min(count, limit)) > elapsed_s:
            count -= 1
        return min(count, limit)


def _solve(elapsed_s: float, base_s: float, growth_s: float) -> int:
    """About the largest n with n·base + growth·n(n−1)/2 ≤ elapsed."""
    if elapsed_s <= 0 or base_s <= 0:
        return 0
    if growth_s <= 0:
        return int(elapsed_s / base_s)
    half = base_s - growth_s / 2
    return int((sqrt(half * half + 2 * growth_s * elapsed_s) - half) / growth_s)


def _envelope(lines: Sequence[Line], limit: float = inf) -> list[tuple[int, float, float]]:
    """Upper envelope over j = 0, 1, … below `limit`: (first j, intercept, slope), slopes rising."""
    if len(lines) == 1:
        return [(0, *lines[0])]
    first, (intercept, slope) = 0, max(lines)
    segments = [(0, intercept, slope)]
    while True:
        steeper = [
            (max(first + 1, int((intercept - other) / (rise - slope)) + 1), other, rise)
            for other, rise in lines
            if rise > slope
        ]
        if not steeper:
            return segments
        # the next to cross; of those that cross before the same iteration, the one on top there
        first, intercept, slope = min(steeper, key=lambda s: (s[0], -(s[1] + s[2] * s[0]), -s[2]))
        if first >= limit:
            return segments
        segments.append((first, intercept, slope))


def _bent_envelope(lines: Sequence[Line], bends: Sequence[Bend], limit: float) -> list[tuple[int, float, float]]:
    """The envelope piece by piece: between the iterations at which a bend passes to its second line, all are straight."""
    passes = [_passes(bend) for bend in bends]
    starts = sorted({0, *(start for start in passes if start < limit)})
    segments = []
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        lower = [later if start >= turn else early for (early, later), turn in zip(bends, passes, strict=True)]
        shifted = [(intercept + slope * start, slope) for intercept, slope in (*lines, *lower)]
        for first, intercept, slope in _envelope(shifted, limit - start):
            if end is None or start + first < end:
                segments.append((start + first, intercept - slope * start, slope))
    return segments


def _passes(bend: Bend) -> int:
    """The first iteration in which the second line is the lower one."""
    (early, rise), (late, growth) = bend
    return max(0, int((late - early) / (rise - growth)) + 1) if late > early else 0
