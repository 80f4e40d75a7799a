"""The time scale of a picture: which parts of the step are drawn, and how wide.

``warm-up, 118 times the same period, cool-down  -->  warm-up | one period, wider | cool-down``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbcompile.schedule.simulate import Timeline
from zbcompile.schedule.steady import Steady, phases, steady_state
from zbcompile.show.units import TimeUnit, ticks

__all__ = ["Scale", "Window"]

_LEAST_PART = 8
"""Fewest columns of a part of the step."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of time that is drawn.

    Inside a picture times are multiplied by the number of columns, so that column edges are whole numbers.

    Attributes
    ----------
    first_ns, last_ns
        The times at the left and right edge.
    columns
        Width of the part in character cells.
    name
        What stands above it.
    """

    first_ns: int
    last_ns: int
    columns: int
    name: str = ""

    def scaled(self, time_ns: int) -> int:
        """Return a time in the picture's own unit, zero at its left edge."""
        return (time_ns - self.first_ns) * self.columns

    def edge(self, column: int) -> int:
        """Return a column's left edge in the picture's own unit."""
        return column * (self.last_ns - self.first_ns)

    def column(self, time_ns: int) -> int:
        """Return the column that holds a time, kept inside the picture."""
        length = max(1, self.last_ns - self.first_ns)
        return min(self.columns - 1, max(0, (time_ns - self.first_ns) * self.columns // length))


@dataclass(frozen=True, slots=True)
class Scale:
    """The parts of the step that are drawn side by side, one column apart.

    Attributes
    ----------
    windows
        The parts, each to its own scale.
    steady
        The steady state, where one period of it stands for all.
    """

    windows: tuple[Window, ...]
    steady: Steady | None = None

    @staticmethod
    def of(
        timeline: Timeline, longest_ns: int, columns: int, window: tuple[int, int] | None, fold: bool | None
    ) -> Scale:
        """Choose the parts of a step to draw.

        Parameters
        ----------
        longest_ns
            The time at the right edge.
        window
            First and last time, where only a part is wanted; then nothing is folded.
        fold
            Whether to draw one period of the steady state for all; None: where actions have no room for
            letter and number otherwise.
        """
        first, last = window or (0, longest_ns)
        whole = Window(first, max(last, first + 1), columns)
        if window is None and fold is not False:
            actions = max(sum(a.kind.is_compute for a in row) for row in timeline.schedule.order)
            if (fold or actions * _room(timeline) > columns) and columns >= 3 * _LEAST_PART + 2:
                steady = steady_state(timeline)
                if steady is not None:
                    return Scale(_folded(timeline, steady, longest_ns, columns), steady)
        return Scale((whole,) if window is not None else _named(timeline, whole))

    def marks(self, unit: TimeUnit, tick: str) -> str:
        """Return the time axis: a mark, and its time, at round times of every part."""
        parts = (_marks(window, unit, tick, with_unit=k == 0) for k, window in enumerate(self.windows))
        return " ".join(parts)

    def names(self, wall: str) -> str:
        """Return the names of the parts, each at the left edge of its part; empty where there are none."""
        if not any(window.name for window in self.windows):
            return ""
        parts = (window.name[: window.columns].ljust(window.columns) for window in self.windows)
        return wall.join(parts).replace("|", wall)


def _room(timeline: Timeline) -> int:
    """Return the columns in which letter and microbatch of an action fit."""
    return 1 + len(str(timeline.schedule.num_microbatches - 1))


def _named(timeline: Timeline, whole: Window) -> tuple[Window, ...]:
    """Return the whole step with its phases above it, as one line of text as wide as the picture."""
    found = phases(timeline)
    if found is None:
        return (whole,)
    line = ""
    for start, name in ((0, "warm-up"), (found[0], "steady state"), (found[1], "cool-down")):
        column = whole.column(start)
        if line and column < len(line) + 1:
            return (whole,)
        line = line.ljust(column) + "|" * bool(line) + name
    name = line if len(line) <= whole.columns else ""
    return (Window(whole.first_ns, whole.last_ns, whole.columns, name),)


def _folded(timeline: Timeline, steady: Steady, longest_ns: int, columns: int) -> tuple[Window, ...]:
    """Return warm-up, one period and cool-down. The period is as wide as its actions want, or a third."""
    order, start = timeline.schedule.order, timeline.start
    end = steady.first_ns + steady.period_ns
    most = max(
        sum(a.kind.is_compute and steady.first_ns <= s < end for a, s in zip(row, starts, strict=True))
        for row, starts in zip(order, start, strict=True)
    )
    before, after = steady.first_ns, longest_ns - steady.last_ns
    rest = columns - 2
    true = rest * steady.period_ns // (before + steady.period_ns + after)
    wide = max(true, min((_room(timeline) + 1) * most, rest // 3), _LEAST_PART)
    wide = min(wide, rest - 2 * _LEAST_PART)
    rest -= wide
    left = min(rest - _LEAST_PART, max(_LEAST_PART, rest * before // max(1, before + after)))
    return (
        Window(0, max(1, before), left, "warm-up"),
        Window(before, end, wide, f"x{steady.repeats} steady"),
        Window(steady.last_ns, max(longest_ns, steady.last_ns + 1), rest - left, "cool-down"),
    )


def _marks(window: Window, unit: TimeUnit, tick: str, *, with_unit: bool) -> str:
    marks = [" "] * window.columns
    widest = len(unit.number(window.last_ns)) + len(unit.name) + 3
    times: Sequence[int] = ticks(window.first_ns, window.last_ns, max(2, window.columns // max(10, widest)))
    for time in times if with_unit else [window.first_ns, *times]:
        label = tick + unit.number(time) + (f" {unit.name}" if with_unit and time == times[0] else "")
        column = window.column(time)
        if column + len(label) <= window.columns and all(
            c == " " for c in marks[max(0, column - 1) : column]
        ):
            marks[column : column + len(label)] = label
    return "".join(marks)
