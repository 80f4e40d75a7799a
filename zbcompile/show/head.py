"""The head of a picture: what is gained, how long the step is, what is proved, and what the order is of."""

from __future__ import annotations

from collections.abc import Iterator

from rich.style import Style

from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.problem import Objective
from zbcompile.show.summary import (
    Proof,
    Summary,
    cuts_line,
    gradients_line,
    headline,
    origin_words,
    proof_line,
    spread_line,
)
from zbcompile.show.units import format_bytes, percent

__all__ = ["facts", "head_lines", "split_words"]

DIM = Style(dim=True)
_GOOD, _FAULT = Style(bold=True, color="#2bb584"), Style(bold=True, color="#e0303a")
_LEAST_GAIN = 0.0005


def head_lines(summary: Summary) -> Iterator[tuple[str, Style | None]]:
    """Yield the lines of the head, each with its style; the first one says what is gained."""
    gain = summary.baseline.gain(summary.timeline.value_ns)
    good = gain is not None and gain >= _LEAST_GAIN
    yield headline(summary), _GOOD if good else Style(bold=True)
    yield lengths(summary), None
    yield proof_line(summary), _FAULT if summary.proof is Proof.OTHER_VALUE else None
    for line in (cuts_line(summary), gradients_line(summary)):
        if line:
            yield line, None
    if line := spread_line(summary):
        yield line, _FAULT
    yield " · ".join(facts(summary)), DIM


def lengths(summary: Summary) -> str:
    """Write span and makespan with their bubbles, the objective first."""
    timeline = summary.timeline
    other: Objective = "makespan" if timeline.problem.objective == "span" else "span"
    return " · ".join(
        f"{name} {summary.unit.text(timeline.length_ns(name))}, bubble {percent(timeline.bubble(name))}"
        for name in (timeline.problem.objective, other)
    )


def facts(summary: Summary) -> list[str]:
    """Return what the order is of: ranks, stages, microbatches, split backwards, sends, caps and origin."""
    problem = summary.timeline.problem
    words = [
        _count(problem.num_ranks, "rank"),
        f"{_count(problem.num_stages, 'stage')}, {problem.placement.name}",
        _count(problem.num_microbatches, "microbatch", "microbatches")
        + (" of different cost" if problem.microbatch_costs else ""),
        split_words(summary.timeline.schedule),
        f"{problem.transport} sends",
    ]
    caps = {cap for cap in problem.caps if cap is not None}
    if caps:
        low, high = format_bytes(min(caps)), format_bytes(max(caps))
        words.append(f"cap {low} a rank" if low == high else f"caps {low} to {high}")
    if origin := origin_words(summary):
        words.append(origin)
    if not summary.has_profile:
        words.append("no profile: F = B = W = 1 unit")
    return words


def split_words(schedule: Schedule) -> str:
    """Say how many backwards of an order are split into B and W."""
    split, whole = schedule.split_backwards
    if split in (0, whole):
        return f"{'all' if split else 'none'} of {whole} backwards split"
    return f"{split} of {whole} backwards split"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
