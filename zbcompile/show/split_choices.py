"""The tables of `zbcompile compare --transport each`: what is split, under every send mode, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from zbcompile.planner.split_choices import OURS, SplitRow, SplitTable
from zbcompile.planner.split_reasons import Cause, Choice, RankReason
from zbcompile.show.units import TimeUnit, format_bytes, percent, time_unit

__all__ = ["Rehearsed", "rank_sentence", "split_choices_json", "split_choices_table"]

Rehearsed = Mapping[tuple[str, str], int]
"""(send mode, row) to the measured value of a rehearsal in ns."""


def split_choices_table(tables: Sequence[SplitTable], rehearsed: Rehearsed | None = None) -> Group:
    """Return the rows of every send mode, and below them one sentence for each rank.

    Parameters
    ----------
    rehearsed
        Measured values; None leaves their columns out.
    """
    values = [row.value_ns for made in tables for row in made.rows if row.value_ns is not None]
    unit = time_unit(max(values, default=1))
    objective = tables[0].problem.objective
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("transport", no_wrap=True)
    table.add_column("order", no_wrap=True, min_width=13)
    measured = ("rehearsed", "over") if rehearsed is not None else ()
    for name in (objective, *measured, "ours shorter", "split", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for made in tables:
        for k, row in enumerate(made.rows):
            mode = made.problem.transport
            cells = _cells(row, made, unit, None if rehearsed is None else rehearsed.get((mode, row.name)))
            style = Style(bold=True) if row.name == OURS else Style.null()
            table.add_row(mode if k == 0 else "", row.name, *_without(cells, rehearsed is None), style=style)
    lines = [line for made in tables for line in _why(made)]
    note = f"times in {unit.name}; split: backwards in B and W; peak of the fullest rank"
    if rehearsed is not None:
        note += "; rehearsed: real processes and messages, sleeping compute; over: than planned"
    return Group(table, Text(), *map(Text, lines), Text(), Text(note, style="dim"))


def _without(cells: Sequence[str], planned_only: bool) -> Sequence[str]:
    return [cells[0], *cells[3:]] if planned_only else cells


def _cells(row: SplitRow, made: SplitTable, unit: TimeUnit, rehearsed_ns: int | None) -> list[str]:
    """Return value, rehearsed value, excess, what ours saves, splits and peak of a row."""
    if row.value_ns is None or row.schedule is None:
        return ["does not fit", "", "", "", "", ""]
    ours = made.ours.value_ns
    saved = "" if row.name == OURS or ours is None else percent(1 - ours / row.value_ns)
    measured, over = "", ""
    if rehearsed_ns is not None:
        measured, over = unit.number(rehearsed_ns), percent(rehearsed_ns / row.value_ns - 1)
    split, count = row.schedule.split_backwards
    peak = format_bytes(max(row.peak_bytes))
    return [unit.number(row.value_ns), measured, over, saved, f"{split} of {count}", peak]


def _why(made: SplitTable) -> list[str]:
    """Return the send mode, and below it a sentence for each group of ranks of which the same is true."""
    if not made.reasons:
        return [f"{made.problem.transport}: {made.ours.why_not}"]
    alike: dict[str, list[RankReason]] = {}
    for reason in made.reasons:
        alike.setdefault(_choices(reason), []).append(reason)
    return [f"{made.problem.transport}:", *map(_sentence, alike.values())]


def rank_sentence(reason: RankReason) -> str:
    """Say in one sentence what a rank splits and fuses, and what decides."""
    return _sentence([reason])


def _sentence(alike: Sequence[RankReason]) -> str:
    *first, last = (str(reason.rank) for reason in alike)
    if not first:
        return f"rank {last} {_choices(alike[0])}."
    return f"each of ranks {', '.join(first)} and {last} {_choices(alike[0])}."


def _choices(reason: RankReason) -> str:
    parts = []
    if reason.split is not None:
        why = _why_split(reason.split, reason)
        parts.append(f"splits {_how_many(reason, reason.split)} (fused, {why})")
    if reason.fused is not None:
        why = _why_fused(reason.fused, reason)
        parts.append(f"fuses {_how_many(reason, reason.fused)} (split, {why})")
    return " and ".join(parts)


def _how_many(reason: RankReason, choice: Choice) -> str:
    other = reason.fused if choice is reason.split else reason.split
    return f"all {choice.count}" if other is None else str(choice.count)


def _why_split(choice: Choice, reason: RankReason) -> str:
    """Say what the step would be if backwards that are split were fused."""
    if choice.change_ns is None:
        return "the step would hang"
    if choice.cause is Cause.TIE:
        return "the step would be as long"
    if choice.cause is Cause.MISSED:
        return f"the step would be {_time(choice.change_ns)} shorter, which the search has missed"
    why = {
        Cause.SAVING: f"BW takes {_time(-reason.saving_ns)} more than B and W",
        Cause.TRAVEL: f"W runs while gradients travel, {_time(reason.travel_ns or 0)} each",
        Cause.MEMORY: "the caps on memory decide",
    }.get(choice.cause, "W fills waits")
    return f"the step would be {_time(choice.change_ns)} longer: {why}"


def _why_fused(choice: Choice, reason: RankReason) -> str:
    """Say what the step would be if backwards that are fused were split."""
    if choice.change_ns is None:
        return "the step would hang"
    if choice.cause is Cause.TIE:
        why = ": no rank waits for these gradients" if reason.travel_ns is None else ""
        return f"the step would be as long{why}"
    if choice.cause is Cause.MEMORY:
        return f"the step would be {_time(choice.change_ns)} shorter, but would not fit under the caps"
    if choice.cause is Cause.MISSED:
        return f"the step would be {_time(choice.change_ns)} shorter, which the search has missed"
    why = {
        Cause.SAVING: f"fusing saves {_time(reason.saving_ns)} each",
        Cause.SENDS: "the rank would wait for the receiver of a gradient that leaves early",
    }.get(choice.cause, "W would fill no wait")
    return f"the step would be {_time(choice.change_ns)} longer: {why}"


def _time(time_ns: int) -> str:
    return time_unit(abs(time_ns)).text(abs(time_ns))


def split_choices_json(tables: Sequence[SplitTable], rehearsed: Rehearsed | None = None) -> dict[str, object]:
    """Return the tables as plain values: times in ns, memory in bytes."""
    return {
        "objective": tables[0].problem.objective,
        "transports": [
            {
                "transport": made.problem.transport,
                "bound_ns": made.bound_ns,
                "rows": [_row_json(row, made, rehearsed) for row in made.rows],
                "ranks": [_rank_json(reason) for reason in made.reasons],
            }
            for made in tables
        ],
    }


def _row_json(row: SplitRow, made: SplitTable, rehearsed: Rehearsed | None) -> dict[str, object]:
    split, count = row.schedule.split_backwards if row.schedule is not None else (None, None)
    return {
        "name": row.name,
        "value_ns": row.value_ns,
        "rehearsed_ns": None if rehearsed is None else rehearsed.get((made.problem.transport, row.name)),
        "split_backwards": split,
        "backwards": count,
        "peak_bytes": list(row.peak_bytes),
        "why_not": row.why_not,
    }


def _rank_json(reason: RankReason) -> dict[str, object]:
    def choice(made: Choice | None) -> dict[str, object] | None:
        if made is None:
            return None
        return {
            "count": made.count,
            "change_ns": made.change_ns,
            "fits": made.fits,
            "cause": made.cause.value,
        }

    return {
        "rank": reason.rank,
        "split": choice(reason.split),
        "fused": choice(reason.fused),
        "fusing_saves_ns": reason.saving_ns,
        "travel_ns": reason.travel_ns,
        "why": rank_sentence(reason),
    }
