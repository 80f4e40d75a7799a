"""The levels of recompute that are worth having for a stage: none of them is beaten by another.

Between "none" and "full" lies a curve of bytes against seconds. A cut at a price finds the point of the curve
at which a second is worth that many bytes, so the price at which two known points are equally good finds one
between them, or shows that the line between them is the curve (Eisner and Severance, Mathematical methods for
selecting record segments, JACM 23(4), 1976). ::

    bytes
    17.3 MB  none
     9.9 MB        3.3e9 bytes per second
     7.9 MB           min_memory
     2.6 MB                            full
              seconds -->
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zbcompile.passes.split.recompute import POLICIES, Recompute

__all__ = ["worthwhile"]

_MOST_CUTS = 6
"""Prices that are tried for a stage."""

_MOST_LEVELS = 6
"""Levels of a stage; the planner weighs all of them on every rank."""

_ALIKE = 1.02
"""A level that is beaten but for so little in one of its costs is not worth having."""


@dataclass(frozen=True, slots=True)
class _Point:
    """A level with its counted costs: times of F, B, W and BW in ns, bytes from F to B and from B to W."""

    level: Recompute
    costs: tuple[int, ...]

    @property
    def ns(self) -> int:
        return sum(self.costs[:3])

    @property
    def held(self) -> int:
        return sum(self.costs[4:])


def worthwhile(
    weigh: Callable[[Recompute], tuple[int, ...]], named: Sequence[str] = POLICIES
) -> tuple[Recompute, ...]:
    """Return the levels of a stage that no other one beats, from the most bytes to the fewest.

    Parameters
    ----------
    weigh
        What the stage costs at a level: ns of F, B, W and BW, bytes from F to B and from B to W.
    named
        The named levels to weigh, "none" first and "full" last.

    Returns
    -------
    tuple
        "none" first, whatever it costs. The last one holds fewest bytes.
    """

    def point(level: Recompute) -> _Point:
        return _Point(level, weigh(level))

    none, *between, full = map(point, named)
    kept = [none]
    for other in (full, *reversed(between), *_between(none, full, point)):
        if not any(_beats(known, other) for known in kept):
            kept.append(other)
    first, *rest = sorted(kept, key=lambda p: (p.level != "none", -p.costs[4], -p.costs[5]))
    while len(rest) > _MOST_LEVELS - 1:
        rest.remove(_least_missed([first, *rest]))
    return tuple(p.level for p in (first, *rest))


def _beats(one: _Point, other: _Point) -> bool:
    return all(a <= _ALIKE * b for a, b in zip(one.costs, other.costs, strict=True))


def _between(top: _Point, end: _Point, point: Callable[[Recompute], _Point]) -> list[_Point]:
    """Return points of the curve between its ends, those of the widest stretches first."""
    found: list[_Point] = []
    open_ = [(top, end)]
    for _ in range(_MOST_CUTS):
        open_ = [pair for pair in open_ if pair[0].held > pair[1].held and pair[0].ns < pair[1].ns]
        if not open_:
            break
        high, low = open_.pop(open_.index(max(open_, key=lambda pair: pair[0].held - pair[1].held)))
        new = point(float((high.held - low.held) * 1_000_000_000 // (low.ns - high.ns)))
        if high.held > new.held > low.held:
            found.append(new)
            open_ += [(high, new), (new, low)]
    return found


def _least_missed(points: list[_Point]) -> _Point:
    """Return the point at a price whose next one above is the nearest in bytes."""
    priced = [k for k, point in enumerate(points) if not isinstance(point.level, str)]
    return points[min(priced, key=lambda k: points[k - 1].held - points[k].held)]
