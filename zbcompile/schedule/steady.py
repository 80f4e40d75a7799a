"""The steady state of a timed order: the stretch that repeats, on all ranks at once, with later microbatches.

``warm-up, n times the same period, cool-down``: what ranks compute in a period is that of the period before,
moved by ``period_ns`` in time and by ``step`` in their microbatches. So the bytes that a rank holds change by
the same amount in every period, mostly by none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.simulate import Timeline

__all__ = ["Steady", "phases", "steady_state"]

_MOST_STEP = 16
"""Most microbatches that one period may take."""
_FEWEST_REPEATS = 3

Moment = tuple[int, int]
"""Start and end of an action in ns."""


@dataclass(frozen=True, slots=True)
class Steady:
    """A stretch of time in which all ranks repeat what they compute.

    Attributes
    ----------
    first_ns
        Where it begins.
    period_ns
        How long it takes once.
    repeats
        How often it is done, three times at least.
    step
        Microbatches that one period takes.
    """

    first_ns: int
    period_ns: int
    repeats: int
    step: int

    @property
    def last_ns(self) -> int:
        """Where it ends."""
        return self.first_ns + self.repeats * self.period_ns


def steady_state(timeline: Timeline) -> Steady | None:
    """Return the stretch around the middle of the step that repeats exactly; None where there is none."""
    schedule = timeline.schedule
    table = _moments(timeline)
    stage = schedule.placement.stages_of(0)[0]
    first = table.get((Kind.FORWARD, stage), {})
    middle = schedule.num_microbatches // 2
    for step in range(1, min(_MOST_STEP, schedule.num_microbatches // _FEWEST_REPEATS) + 1):
        if middle not in first or middle + step not in first:
            return None
        around, period = first[middle][0], first[middle + step][0] - first[middle][0]
        own = [row for (_, s), row in table.items() if schedule.placement.rank_of[s] == 0]
        if period > 0 and _stretch(own, around, period, step) is not None:
            found = _stretch(table.values(), around, period, step)
            if found is not None:
                return _aligned(found, [moment[0] for moment in first.values()], period, step)
    return None


def _moments(timeline: Timeline) -> dict[tuple[Kind, int], dict[int, Moment]]:
    """Return per kind and stage of compute actions: microbatch -> its times."""
    table: dict[tuple[Kind, int], dict[int, Moment]] = {}
    rows = zip(timeline.schedule.order, timeline.start, timeline.end, strict=True)
    for row, starts, ends in rows:
        for action, start, end in zip(row, starts, ends, strict=True):
            if action.kind.is_compute:
                table.setdefault((action.kind, action.stage), {})[action.microbatch] = start, end
    return table


def _stretch(
    rows: Iterable[dict[int, Moment]], around: int, period: int, step: int
) -> tuple[int, int] | None:
    """Return the longest stretch (first, last) around a time in which all that starts repeats.

    What starts in it, but for its last period, has its like a period later; what starts in it, but for its
    first period, has its like a period before.
    """
    low, high = 0, 1 << 62
    for row in rows:
        for start in _without_like(row, period, step):
            if start < around:
                low = max(low, start + 1)
            else:
                high = min(high, start)
        if high <= low or (high + period - low) // period < _FEWEST_REPEATS:
            return None
    return low, high + period


def _without_like(row: dict[int, Moment], period: int, step: int) -> Iterator[int]:
    """Yield the starts of actions without their like a period later, and those a period before such ones."""
    for microbatch, (start, end) in row.items():
        if row.get(microbatch + step) != (start + period, end + period):
            yield start
        if row.get(microbatch - step) != (start - period, end - period):
            yield start - period


def _aligned(found: tuple[int, int], starts: Iterable[int], period: int, step: int) -> Steady | None:
    """Begin the stretch where the first rank begins a forward, if it then still repeats often enough."""
    low, high = found
    first = min((start for start in starts if start >= low), default=low)
    repeats = (high - first) // period
    return Steady(first, period, repeats, step) if repeats >= _FEWEST_REPEATS else None


def phases(timeline: Timeline) -> tuple[int, int] | None:
    """Return when every rank has begun a backward, and when the first rank has done its last forward, in ns.

    Before the first time the pipeline fills, after the second it drains. None where a rank has no forward or
    no backward, or where the two times do not come in this order.
    """
    filled, drains = 0, timeline.makespan_ns
    for row, starts, ends in zip(timeline.schedule.order, timeline.start, timeline.end, strict=True):
        backward = min((s for a, s in zip(row, starts, strict=True) if _is_backward(a)), default=None)
        forward = max((e for a, e in zip(row, ends, strict=True) if a.kind is Kind.FORWARD), default=None)
        if backward is None or forward is None:
            return None
        filled, drains = max(filled, backward), min(drains, forward)
    return (filled, drains) if filled < drains else None


def _is_backward(action: Action) -> bool:
    return action.kind in (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)
