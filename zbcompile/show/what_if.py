"""The table of ``zbcompile explain --what-if``: what every change gives, against the step as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from zbcompile.planner.what_if import Outcome, Worth
from zbcompile.schedule.problem import Problem
from zbcompile.show.prose import Prose
from zbcompile.show.units import TimeUnit, format_bytes, time_unit

__all__ = ["WhatIf", "what_if_json", "what_if_table"]

_FORMAT, _VERSION = "zbcompile.what_if", 1


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What came of all changes.

    Attributes
    ----------
    problem
        The step as it is.
    given_ns
        Value of the order that was given.
    base
        The step as it is, planned again.
    rows
        The changes.
    worth
        What one more activation of memory is worth; None where that is not known.
    """

    problem: Problem
    given_ns: int
    base: Outcome
    rows: Sequence[Outcome]
    worth: Worth | None

    @property
    def unit(self) -> TimeUnit:
        """The unit in which the values read well."""
        return time_unit(self.given_ns)

    def gain(self, row: Outcome) -> int | None:
        """Return how much longer a row is than the step as it is, in ns; None where one has no order."""
        if row.value_ns is None or self.base.value_ns is None:
            return None
        return row.value_ns - self.base.value_ns

    def settled(self, row: Outcome) -> bool:
        """Return whether the bounds prove that a row is shorter or longer, or as long, as it reads."""
        base = self.base
        if row.value_ns is None or row.bound_ns is None or base.value_ns is None or base.bound_ns is None:
            return False
        shorter, longer = row.value_ns < base.bound_ns, row.bound_ns > base.value_ns
        return shorter or longer or (row.proved and base.proved)

    def exact(self, row: Outcome) -> bool:
        """Return whether both values are proved, so that no longer search changes what lies between them."""
        return row.proved and self.base.proved


def what_if_table(found: WhatIf) -> Group:
    """Return the table of the changes, with notes on rows that nothing fits."""
    unit, objective = found.unit, found.problem.objective
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("what if", min_width=24, overflow="fold")
    for name in (objective, "bound", "gap", "against as it is"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in (found.base, *found.rows):
        table.add_row(row.name, *_cells(found, row, unit))
    return Group(table, Prose(""), *_notes(found))


def _cells(found: WhatIf, row: Outcome, unit: TimeUnit) -> list[str]:
    if row.value_ns is None or row.bound_ns is None:
        return ["nothing fits", "", "", ""]
    if row.value_ns == row.bound_ns:
        gap = "proved"
    else:
        hundredths = -(-10_000 * (row.value_ns - row.bound_ns) // row.value_ns)
        gap = f"{hundredths // 100}.{hundredths % 100:02d} %"
    cells = [unit.text(row.value_ns), unit.text(row.bound_ns), gap]
    more = found.gain(row)
    if row is found.base or more is None or not found.base.value_ns:
        return [*cells, ""]
    sign = "" if found.exact(row) else "~"
    size = time_unit(abs(more)).text(abs(more))
    text = (
        f"{'-' if more < 0 else '+'}{size} ({100 * more / found.base.value_ns:+.1f} %)"
        if more
        else "the same"
    )
    return [*cells, sign + text]


def _notes(found: WhatIf) -> Iterator[RenderableType]:
    unit = found.unit
    given = unit.text(found.given_ns)
    if found.base.value_ns is not None and found.base.value_ns < found.given_ns:
        yield Prose(f"the order given takes {given}: planning it again finds a shorter one")
    rows = [row for row in found.rows if found.gain(row) is not None and not found.exact(row)]
    if rows:
        text = "~: one of the two values is not proved, and a longer search may change the amount"
        open_rows = [row.name for row in rows if not found.settled(row)]
        if len(open_rows) == len(rows):
            text += "; the bounds do not settle which is shorter"
        elif open_rows:
            text += f"; the bounds do not settle which is shorter with {'; '.join(open_rows)}"
        else:
            text += ", but not which is shorter"
        yield Prose(text, style="dim")
    for row in found.rows:
        if row.value_ns is None:
            yield Prose(f"{row.name}: {row.why_not}")
    if found.worth is not None:
        yield Prose(_worth(found.worth, unit))


def _worth(worth: Worth, unit: TimeUnit) -> str:
    least, most = min(worth.more_bytes), max(worth.more_bytes)
    size = format_bytes(most) if least == most else f"{format_bytes(least)} to {format_bytes(most)}"
    less = worth.bound_ns - worth.more_ns
    text = f"one more activation on every rank ({size}) "
    text += f"lowers the bound by {time_unit(less).text(less)}" if less else "does not lower the bound"
    if worth.formula_ns is not None:
        text += (
            f". Equal stages in a V: no order has less idle time than 3(p-1)(f+b+2c) + 2(f+b) - N(f+b+w) + w"
            f" = {unit.text(worth.formula_ns)}, with room for N activations of a stage: each is"
            f" worth f+b+w, until another bound takes over"
        )
    return text


def what_if_json(found: WhatIf) -> dict[str, object]:
    """Return the table as plain values: times in ns, memory in bytes."""
    worth = found.worth
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "objective": found.problem.objective,
        "given_ns": found.given_ns,
        "as_it_is": _row(found, found.base),
        "changes": [_row(found, row) for row in found.rows],
        "one_more_activation": None
        if worth is None
        else {
            "more_bytes": list(worth.more_bytes),
            "bound_ns": worth.bound_ns,
            "bound_with_more_ns": worth.more_ns,
            "idle_by_formula_ns": worth.formula_ns,
        },
    }


def _row(found: WhatIf, row: Outcome) -> dict[str, object]:
    return {
        "name": row.name,
        "objective": row.objective,
        "value_ns": row.value_ns,
        "bound_ns": row.bound_ns,
        "against_as_it_is_ns": found.gain(row),
        "settled_by_bounds": found.settled(row),
        "lineage": list(row.lineage),
        "why_not": row.why_not or None,
    }
