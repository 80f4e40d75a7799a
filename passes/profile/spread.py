"""Whether repeated times of one piece of work agree.

A machine that other programs keep busy, or more threads than cores, can make a time wrong by orders of
magnitude, and the median of a few runs does not show it. The shortest run does: it is the one that was
disturbed least.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Spread", "spread_of", "warning_text", "widest"]

_FACTOR = 2.0
_LEAST_NS = 100_000
"""Differences below this are the clock's and the interpreter's own, and decide no order."""
_PHASES = ("F", "B", "W", "BW")


@dataclass(frozen=True, slots=True)
class Spread:
    """Times of one phase of one stage that differ widely.

    Attributes
    ----------
    stage, phase
        What was timed.
    shortest_ns, median_ns, longest_ns
        Of its runs; the median is what the profile says.
    runs
        How many there were.
    """

    stage: int
    phase: str
    shortest_ns: int
    median_ns: int
    longest_ns: int
    runs: int

    @property
    def factor(self) -> float:
        """How many times the shortest run the median is."""
        return self.median_ns / max(1, self.shortest_ns)

    def __str__(self) -> str:
        shortest, median, longest = (
            f"{ns / 1e6:.2f}" for ns in (self.shortest_ns, self.median_ns, self.longest_ns)
        )
        took = f"{self.phase} of stage {self.stage} took {shortest} to {longest} ms in {self.runs} runs"
        return f"{took}, {median} is used"


def spread_of(stage: int, samples: Sequence[Sequence[int]]) -> Spread | None:
    """Return the phase whose runs differ most; None if all of them agree.

    Parameters
    ----------
    stage
        Its number.
    samples
        For each run the times of F, B, W and BW in ns.
    """
    found = []
    for phase, column in zip(_PHASES, zip(*samples, strict=True), strict=True):
        median = int(statistics.median(column))
        spread = Spread(stage, phase, min(column), median, max(column), len(column))
        if spread.factor > _FACTOR and median - spread.shortest_ns > _LEAST_NS:
            found.append(spread)
    return widest(found)


def widest(spreads: Sequence[Spread | None]) -> Spread | None:
    """Return the one with the largest factor; None if there is none."""
    return max((s for s in spreads if s is not None), key=lambda s: s.factor, default=None)


def warning_text(spread: Spread, threads: int) -> str:
    """Return what a user is told, and what to do."""
    return (
        f"repeated times differ widely: {spread}; a plan for these times may be far from the best. "
        f"Measure while nothing else keeps the machine busy, with OMP_NUM_THREADS=1 (torch uses {threads} "
        "here), or give profile="
    )
