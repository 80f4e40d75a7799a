"""The table of `zbcompile compare`: published orders beside ours, at equal memory."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from zbcompile.planner.compare import WITHOUT_ZERO_BUBBLE, Comparison, verdict
from zbcompile.show.units import format_bytes, found_by, percent, time_unit

__all__ = ["comparison_json", "comparison_table", "worth"]


def comparison_table(rows: Sequence[Comparison]) -> Group:
    """Return the verdict in one line and a table with one row per order.

    The column ``ours there`` is our value with every rank's cap at that order's peak.
    """
    unit = time_unit(max(row.makespan_ns for row in rows))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("order", no_wrap=True, min_width=17)
    table.add_column("placement", no_wrap=True)
    for name in ("span", "makespan", "bubble", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("split", justify="right", no_wrap=True)
    table.add_column("fits", min_width=4)
    for name in ("ours there", "shorter", "gap left"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        saved = 1 - row.ours_ns / row.value_ns if row.value_ns else 0.0
        table.add_row(
            row.name,
            row.placement,
            unit.number(row.span_ns),
            unit.number(row.makespan_ns),
            percent(row.bubble),
            format_bytes(max(row.peak_bytes)),
            str(row.split[0]),
            "yes" if row.fits else "no",
            unit.number(row.ours_ns),
            "" if row.is_ours else percent(saved),
            _gap(row),
            style=Style(bold=True) if row.is_ours else Style.null(),
        )
    objective = rows[0].objective
    note = (
        f"times in {unit.name}; bubble of the {objective}; peak of the fullest rank; fits: under the caps\n"
        f"split: backwards in B and W, of {rows[0].split[1]}\n"
        f"ours there: our {objective}, every rank's cap at that order's peak; gap left: to the proved bound"
    )
    note += "".join(f"\n{row.name}: {found_by(row.lineage)}" for row in rows if row.is_ours and row.lineage)
    return Group(Text(worth(rows), style="bold"), Text(), table, Text(), Text(note, style="dim"))


def worth(rows: Sequence[Comparison]) -> str:
    """Say in one sentence whether zero bubble is worth it here, and what is gained over published orders."""
    said = verdict(list(rows))
    ours = next(row for row in rows if row.is_ours)
    known = [row for row in rows if row.fits and not row.is_ours and row.name not in WITHOUT_ZERO_BUBBLE]
    best = min(known, key=lambda row: row.value_ns, default=None)
    plain = any(row.name in WITHOUT_ZERO_BUBBLE for row in rows)
    if not plain or "does not pay" in said or best is None or not best.value_ns:
        return said
    saved = 1 - ours.value_ns / best.value_ns
    over = f"{percent(saved)} shorter than" if saved > 0 else "as long as"
    return f"zero bubble is worth it here: {said}, {over} {best.name}, the best published with it that fits"


def _gap(row: Comparison) -> str:
    """Write the gap to the proved bound, rounded up, so that it never reads as less than it is."""
    if row.ours_ns <= row.bound_ns:
        return "proved"
    hundredths = -(-10_000 * (row.ours_ns - row.bound_ns) // row.ours_ns)
    return f"{hundredths // 100}.{hundredths % 100:02d} %"


def comparison_json(rows: Sequence[Comparison]) -> dict[str, object]:
    """Return the table as plain values: times in ns, memory in bytes, shares as fractions."""
    return {
        "objective": rows[0].objective,
        "verdict": worth(rows),
        "orders": [
            {
                "name": row.name,
                "placement": row.placement,
                "span_ns": row.span_ns,
                "makespan_ns": row.makespan_ns,
                "bubble": row.bubble,
                "peak_bytes": list(row.peak_bytes),
                "split_backwards": row.split[0],
                "backwards": row.split[1],
                "fits": row.fits,
                "ours_ns": row.ours_ns,
                "bound_ns": row.bound_ns,
                "ours_lineage": list(row.lineage),
            }
            for row in rows
        ],
    }
