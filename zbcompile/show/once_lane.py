"""The lane of what a rank does once a step: gathers and reductions on its channel, and its update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text

from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.simulate import Timeline
from zbcompile.schedule.stage_actions import update_ns
from zbcompile.show.palette import Glyphs, ink
from zbcompile.show.scale import Window

__all__ = ["NAMES", "Once", "kind_of", "once_among", "once_lane", "once_times", "style_of"]

NAMES = {
    "G": "gather of parameters (UNSHARD)",
    "R": "reduction of gradients (REDUCE_GRAD)",
    "U": "update by the optimizer",
}
"""The letters of the lane, and what they mean."""

_LETTERS = {Kind.UNSHARD: "G", Kind.REDUCE_GRAD: "R"}


@dataclass(frozen=True, slots=True)
class Once:
    """Something that a rank does once a step.

    Attributes
    ----------
    letter
        One of `NAMES`.
    stage
        The stage; None for the update, which is of all stages of the rank.
    """

    letter: str
    stage: int | None
    start_ns: int
    end_ns: int


def once_times(timeline: Timeline, rank: int) -> list[Once]:
    """Return what a rank does once a step and takes time, in order of time."""
    rows = zip(timeline.schedule.order[rank], timeline.start[rank], timeline.end[rank], strict=True)
    update, end = update_ns(timeline.problem, rank), timeline.rank_end[rank]
    return once_among(rows) + ([Once("U", None, end - update, end)] if update else [])


def once_among(row: Iterable[tuple[Action, int, int]]) -> list[Once]:
    """Return what of (action, start, end) is done once a step and takes time."""
    return [
        Once(_LETTERS[action.kind], action.stage, start, end)
        for action, start, end in row
        if action.kind in _LETTERS and end > start
    ]


def once_lane(times: list[Once], window: Window, glyphs: Glyphs, *, colour: bool) -> Text:
    """Draw it in a part of the step: a letter and the stage, stretched; at least one column each."""
    cells: list[tuple[str, Style]] = [(" ", Style.null())] * window.columns
    for once in times:
        if once.end_ns <= window.first_ns or once.start_ns >= window.last_ns:
            continue
        first, last = window.column(once.start_ns), window.column(once.end_ns - 1)
        columns = last - first + 1
        label = once.letter + ("" if once.stage is None else str(once.stage))
        label = label if len(label) <= columns else once.letter
        style = style_of(once.letter) if colour else Style.null()
        for k, sign in enumerate(label + glyphs.wire * (columns - len(label))):
            cells[first + k] = (sign, style)
    lane = Text(end="")
    for sign, style in cells:
        lane.append(sign, style)
    return lane


def style_of(letter: str) -> Style:
    """Return the colour of a letter: that of what it brings."""
    return ink(kind_of(letter))


def kind_of(letter: str) -> Kind:
    """Return the kind of action whose colour a letter has."""
    return {"G": Kind.FORWARD, "R": Kind.BACKWARD_WEIGHT, "U": Kind.FULL_BACKWARD}[letter]
