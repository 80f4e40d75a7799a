"""Measured times whose repeats differ widely: the costs that are made of them may be wrong.

``repeats of F, B, W and BW of all stages --> those that were not steady``. Where other programs keep the
machine busy, or where too many threads share its cores, a stage can look many times slower than it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zbcompile.errors import UsageError

__all__ = ["Repeats", "Spread", "spread_words", "unsteady"]

Repeats = Mapping[tuple[str, str], Sequence[int]]
"""Times in ns by (place, kind), such as ``("stage 2", "F")``."""

_WIDE = 2.0
"""Repeats differ widely where their median takes so many times as long as the fastest."""
_SHARE, _LEAST_NS = 0.05, 100_000
"""Differences below this share of the largest median, or below this, are left out: they move no order."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeats of one measured time that differ widely.

    Attributes
    ----------
    place
        What was measured, such as ``stage 2``. It keeps this name where stages are joined later.
    kind
        F, B, W or BW.
    fastest_ns, median_ns, slowest_ns
        Of all repeats, in ns. The median is the cost that is planned with.
    repeats
        How often it was measured.

    Raises
    ------
    UsageError
        The times are not in this order.
    """

    place: str
    kind: str
    fastest_ns: int
    median_ns: int
    slowest_ns: int
    repeats: int

    def __post_init__(self) -> None:
        if not 0 <= self.fastest_ns <= self.median_ns <= self.slowest_ns:
            raise UsageError(
                "the times of a spread are not in order",
                where=f"{self.kind} of {self.place}",
                needed="0 <= fastest_ns <= median_ns <= slowest_ns",
                given=(self.fastest_ns, self.median_ns, self.slowest_ns),
            )

    @property
    def ratio(self) -> float:
        """The slowest repeat over the fastest; a fastest one of 0 ns counts as 1 ns."""
        return self.slowest_ns / max(1, self.fastest_ns)


def unsteady(times: Repeats) -> tuple[Spread, ...]:
    """Return the times whose repeats differ widely, the widest first.

    The fastest repeat was disturbed least, so the median is held against it. A few slow repeats do not move a
    median and are not spoken of. Two repeats have their mean for a median.
    """
    largest = max((statistics.median(values) for values in times.values() if values), default=0)
    found = []
    for (place, kind), values in times.items():
        if len(values) < 2:
            continue
        fastest, median, slowest = min(values), int(statistics.median(values)), max(values)
        if median >= _WIDE * max(1, fastest) and median - fastest >= max(_LEAST_NS, _SHARE * largest):
            found.append(Spread(place, kind, fastest, median, slowest, len(values)))
    return tuple(sorted(found, key=lambda spread: -spread.ratio))


def spread_words(found: Sequence[Spread]) -> str:
    """Say which times were not steady, with their figures, and what to do; empty where all were."""
    if not found:
        return ""
    named = ", ".join(map(_one, found[:_MOST_NAMED]))
    if len(found) > _MOST_NAMED:
        named += f" and {len(found) - _MOST_NAMED} more"
    return (
        f"measured times differ widely between repeats: {named}. These costs may be wrong, and so may an "
        "order made for them. Measure again while nothing else runs and with one thread per process "
        "(OMP_NUM_THREADS=1), or give a profile"
    )


def _one(spread: Spread) -> str:
    low, middle, high = (f"{ns / 1e6:.3g}" for ns in (spread.fastest_ns, spread.median_ns, spread.slowest_ns))
    return (
        f"{spread.kind} of {spread.place} {low} to {high} ms in {spread.repeats} repeats (median {middle} ms)"
    )
