"""What a plan gains over published orders on the same ranks and memory, and whether that is worth it."""

from __future__ import annotations

from collections.abc import Sequence

from zbcompile.planner.rivals import INTERLEAVED, Rival
from zbcompile.show.summary import Summary
from zbcompile.show.units import percent

__all__ = ["WORTH", "gain_line"]

WORTH = 0.01
"""The least share by which a plan must be shorter than the best order without zero bubble to be worth it."""

_ALIKE = 0.0005


def gain_line(summary: Summary, others: Sequence[Rival]) -> str:
    """Say in one line whether zero bubble is worth it, and how much shorter the plan is than each order.

    Parameters
    ----------
    summary
        The plan, with 1F1B beside it.
    others
        The other published orders on its ranks.
    """
    value, baseline = summary.timeline.value_ns, summary.baseline.timeline
    plain = [] if baseline is None else [baseline.value_ns]
    plain += [r.value_ns for r in others if r.name == INTERLEAVED and r.fits and r.value_ns is not None]
    words = [_over_1f1b(summary), *(_over(summary, rival) for rival in others)]
    if any(r.fits and r.value_ns is not None and value * (1 - WORTH) > r.value_ns for r in others):
        halves = any(rival.halves for rival in others)
        words.append(f"try {'two stages per rank' if halves else '--placement auto'}")
    bubbleless = [value, *(r.value_ns for r in others if r.name != INTERLEAVED and r.fits and r.value_ns)]
    return f"{_verdict(min(bubbleless), plain)}{'; '.join(words)}"


def _verdict(value: int, plain: Sequence[int]) -> str:
    """Hold the shortest order with zero bubble, ours or published, against those without."""
    if not plain or not min(plain):
        return ""
    worth = 1 - value / min(plain) >= WORTH
    return f"zero bubble {'is worth it' if worth else 'does not pay'} here: "


def _over_1f1b(summary: Summary) -> str:
    timeline, baseline = summary.timeline, summary.baseline
    length = f"{timeline.problem.objective} {summary.unit.text(timeline.value_ns)}"
    if baseline.timeline is None:
        return f"{length}; 1F1B does not apply: {baseline.why}"
    capped = any(cap is not None for cap in timeline.problem.caps)
    few = baseline.in_flight < min(timeline.schedule.num_ranks, timeline.schedule.num_microbatches)
    how = f", 1F1B cut down to {baseline.in_flight} in flight so that it fits" if few else ""
    at = f" at the same memory{how}" if capped else f" with no cap on memory{how}"
    other = summary.unit.text(baseline.timeline.value_ns)
    return f"{length} is {_than(timeline.value_ns, baseline.timeline.value_ns)} 1F1B ({other}){at}"


def _over(summary: Summary, rival: Rival) -> str:
    if rival.value_ns is None:
        return f"{rival.name} does not apply: {rival.why}"
    if not rival.fits:
        return f"{rival.name} does not fit"
    how = f"{summary.unit.text(rival.value_ns)}{', stages in halves' if rival.halves else ''}"
    return f"{_than(summary.timeline.value_ns, rival.value_ns)} {rival.name} ({how})"


def _than(value: int, other: int) -> str:
    gain = 1 - value / other if other else 0.0
    if abs(gain) < _ALIKE:
        return "as long as"
    return f"{percent(abs(gain))} {'shorter' if gain > 0 else 'longer'} than"
