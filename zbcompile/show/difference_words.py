"""What `zbcompile diff` prints, in words and as plain values."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from zbcompile.formats.schedule_json import action_to
from zbcompile.schedule.ir import Action
from zbcompile.show.difference import Difference, RankDifference, Side
from zbcompile.show.prose import Prose
from zbcompile.show.units import format_bytes, time_unit
from zbcompile.show.wait_words import listed

__all__ = ["difference_json", "difference_text"]

_FORMAT, _VERSION = "zbcompile.difference", 1
_MOST_RANKS = 16


def difference_text(found: Difference) -> Group:
    """Return what differs between two schedules, for a terminal."""
    if found.same:
        lines: list[RenderableType] = [Prose("the same order of the same problem", style="bold")]
        return Group(*lines, *(Prose(f"note: {note}") for note in found.notes))
    figures = [*_values(found), *_table(found)] if found.alike_costs else []
    return Group(*_problem(found), *_order(found), *figures, *_notes(found))


def _notes(found: Difference) -> Iterator[RenderableType]:
    for note in found.notes:
        yield Prose(f"note: {note}")


def _problem(found: Difference) -> Iterator[RenderableType]:
    if not found.problems:
        yield Prose("the problem is the same")
        return
    yield Prose("the problems differ", style="bold")
    for line in found.problems:
        yield Prose(line, 4)


def _order(found: Difference) -> Iterator[RenderableType]:
    """Say on which ranks the orders differ, and where first."""
    if not found.comparable:
        yield Prose("the orders are of other stages, ranks or microbatches: not compared action by action")
        return
    if not found.ranks:
        yield Prose("the orders are the same", style="bold")
        return
    moved = sum(row.moved for row in found.ranks)
    other = sum(row.only_first + row.only_second for row in found.ranks)
    who = f"rank{'s' * (len(found.ranks) > 1)} {listed([row.rank for row in found.ranks])}"
    text = f"the orders differ on {who}: {moved} action{'s' * (moved != 1)} moved"
    if other:
        text += f", {other} in one of them alone (split here, fused there)"
    yield Prose(text, style="bold")
    earliest = [row for row in found.ranks if row.position is not None]
    if earliest:
        first = min(earliest, key=lambda row: _time(found.first, row.rank, row.position or 0))
        yield Prose(f"first of all {_where(found, first)}")


def _time(side: Side, rank: int, position: int) -> int:
    """Return when the compute action at a place of a rank starts, or when the rank ends."""
    timeline = side.timeline
    row = timeline.schedule.order[rank]
    starts = [s for a, s in zip(row, timeline.start[rank], strict=True) if a.kind.is_compute]
    return starts[position] if position < len(starts) else timeline.rank_end[rank]


def _where(found: Difference, row: RankDifference) -> str:
    unit = time_unit(found.first.timeline.makespan_ns, abstract=found.first.file.problem is None)
    at = unit.text(_time(found.first, row.rank, row.position or 0))
    names = (_name(row.first), _name(row.second))
    return f"on rank {row.rank} at {at}, compute action {row.position}: {names[0]} against {names[1]}"


def _name(action: Action | None) -> str:
    return "the end" if action is None else str(action)


def _values(found: Difference) -> Iterator[RenderableType]:
    one, other = found.first.timeline, found.second.timeline
    unit = time_unit(max(one.makespan_ns, other.makespan_ns), abstract=found.first.file.problem is None)
    for name, a, b in (
        ("span", one.span_ns, other.span_ns),
        ("makespan", one.makespan_ns, other.makespan_ns),
    ):
        change = f" ({100 * (b / a - 1):+.2f} %)" if a and a != b else ""
        yield Prose(f"{name}: {unit.text(a)} against {unit.text(b)}{change}")
    if found.second_under_first_ns is not None:
        value = unit.text(found.second_under_first_ns)
        yield Prose(f"the second order under the first problem: {one.problem.objective} {value}")


def _table(found: Difference) -> Iterator[RenderableType]:
    """Yield a row per rank with another order, peak or span."""
    one, other = found.first, found.second
    if one.problem.num_ranks != other.problem.num_ranks:
        return
    changed = {row.rank: row for row in found.ranks}
    unit = time_unit(max(one.timeline.makespan_ns, other.timeline.makespan_ns))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("rank", "moved", "from action", "split", "peak", "span"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = 0
    for rank in range(one.problem.num_ranks):
        pairs = [
            (str(one.splits(rank)), str(other.splits(rank))),
            (format_bytes(one.timeline.peak_bytes[rank]), format_bytes(other.timeline.peak_bytes[rank])),
            (unit.text(one.timeline.rank_span[rank]), unit.text(other.timeline.rank_span[rank])),
        ]
        if rank not in changed and all(a == b for a, b in pairs):
            continue
        rows += 1
        if rows > _MOST_RANKS:
            continue
        row = changed.get(rank)
        cells = ["" if row is None else str(row.moved), "" if row is None else _place(row)]
        table.add_row(str(rank), *cells, *(a if a == b else f"{a} -> {b}" for a, b in pairs))
    if rows:
        yield Prose("")
        yield table
    if rows > _MOST_RANKS:
        yield Prose(f"... {rows - _MOST_RANKS} more ranks; --json has all")


def _place(row: RankDifference) -> str:
    return "messages" if row.position is None else str(row.position)


def difference_json(found: Difference) -> dict[str, object]:
    """Return what differs as plain values: times in ns, memory in bytes, actions as in a schedule file."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "same": found.same,
        "problems": list(found.problems),
        "comparable": found.comparable,
        "moved": sum(row.moved for row in found.ranks),
        "first": _side(found.first),
        "second": _side(found.second),
        "second_under_first_ns": found.second_under_first_ns,
        "ranks": [
            {
                "rank": row.rank,
                "position": row.position,
                "first": None if row.first is None else action_to(row.first),
                "second": None if row.second is None else action_to(row.second),
                "moved": row.moved,
                "only_first": row.only_first,
                "only_second": row.only_second,
                "messages_differ": row.messages,
            }
            for row in found.ranks
        ],
        "notes": list(found.notes),
    }


def _side(side: Side) -> dict[str, object]:
    timeline, ranks = side.timeline, range(side.problem.num_ranks)
    return {
        "objective": side.problem.objective,
        "value_ns": timeline.value_ns,
        "span_ns": timeline.span_ns,
        "makespan_ns": timeline.makespan_ns,
        "rank_span_ns": list(timeline.rank_span),
        "peak_bytes": list(timeline.peak_bytes) if side.file.problem is not None else None,
        "split": [side.splits(rank) for rank in ranks],
        "bubble": timeline.bubble(),
    }
