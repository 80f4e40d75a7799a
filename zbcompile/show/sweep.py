"""The outcome of `zbcompile sweep`: a table, a plot of time against memory, CSV, JSON and SVG."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from xml.sax.saxutils import escape

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from zbcompile.errors import printable
from zbcompile.planner.sweep import Swept, best
from zbcompile.show.units import TimeUnit, format_bytes, time_unit

__all__ = ["sweep_csv", "sweep_json", "sweep_plot", "sweep_svg", "sweep_table"]

_COLUMNS, _LINES = 56, 14
"""Size of the plot in the terminal."""

_NAMED = 2
"""Combinations without a plan that are named beside a reason that they share."""

_WIDE, _HIGH, _EDGE = 640, 400, 70
"""Size of the SVG in pixels, and of the edge that holds the axes' words."""


def sweep_table(rows: Sequence[Swept]) -> Group:
    """Return the table, the rows that nothing beats in bold, and the plot."""
    front, unit = best(rows), _unit(rows)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("", *rows[0].words):
        table.add_column(name, no_wrap=True)
    for name in ("step", "per microbatch", "gap", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    refused: dict[str, list[str]] = {}
    for place, row in enumerate(rows):
        words = [printable(word) for word in row.words.values()]
        if row.value_ns is None or row.bound_ns is None or row.peak_bytes is None:
            refused.setdefault(row.refusal, []).append(" ".join(words))
            table.add_row("", *words, "no", "", "", "", style=Style(dim=True))
            continue
        times = (unit.number(row.value_ns), unit.number(round(row.each_ns or 0)))
        table.add_row(
            "*" if place in front else "",
            *words,
            *times,
            _gap(row.value_ns, row.bound_ns),
            format_bytes(row.peak_bytes),
            style=Style(bold=True) if place in front else Style.null(),
        )
    note = f"times in {unit.name}; peak of the fullest rank; * nothing here is shorter and holds less"
    parts: list[Text | Table] = [table, Text(), Text(note, style="dim")]
    parts += [Text(_refusal(why, where), style="dim") for why, where in refused.items()]
    if len(front) > 1:
        parts += [Text(), Text(sweep_plot(rows))]
    return Group(*parts)


def _refusal(why: str, where: Sequence[str]) -> str:
    """Say once why some combinations have no plan, how many they are, and the first of them."""
    if len(where) == 1:
        return f"no plan: {where[0]}: {why}"
    named = ", ".join(where[:_NAMED]) + ", ..." * (len(where) > _NAMED)
    return f"no plan for {len(where)} of the combinations ({named}): {why}"


def _unit(rows: Sequence[Swept]) -> TimeUnit:
    return time_unit(max((row.value_ns or 0 for row in rows), default=0))


def _gap(value: int, bound: int) -> str:
    """Write the gap to the proved bound, rounded up, so that it never reads as less than it is."""
    if value <= bound:
        return "proved"
    hundredths = -(-10_000 * (value - bound) // value)
    return f"{hundredths // 100}.{hundredths % 100:02d} %"


def _places(rows: Sequence[Swept]) -> list[tuple[int, float, int]]:
    """Return (place, ns per microbatch, peak bytes) of the rows that were planned."""
    return [
        (place, row.each_ns, row.peak_bytes)
        for place, row in enumerate(rows)
        if row.each_ns is not None and row.peak_bytes is not None
    ]


def _scaled(value: float, low: float, high: float, size: int) -> int:
    return round((value - low) / (high - low) * size) if high > low else 0


def sweep_plot(rows: Sequence[Swept]) -> str:
    """Return the plot in characters: memory to the right, time upward; ``*`` is on the front."""
    points, front, unit = _places(rows), best(rows), _unit(rows)
    slow, fast = max(t for _, t, _ in points), min(t for _, t, _ in points)
    lean, full = min(b for _, _, b in points), max(b for _, _, b in points)
    grid = [[" "] * (_COLUMNS + 1) for _ in range(_LINES + 1)]
    for place, each, held in sorted(points, key=lambda point: point[0] in front):
        line = _LINES - _scaled(each, fast, slow, _LINES)
        grid[line][_scaled(held, lean, full, _COLUMNS)] = "*" if place in front else "o"
    labels = {0: unit.number(round(slow)), _LINES: unit.number(round(fast))}
    wide = max(map(len, labels.values()))
    lines = [f"{unit.name} per microbatch"]
    lines += [f"{labels.get(k, ''):>{wide}} |{''.join(row).rstrip()}" for k, row in enumerate(grid)]
    left, right = format_bytes(lean), format_bytes(full)
    lines.append(f"{'':>{wide}} +{'-' * (_COLUMNS + 1)}")
    lines.append(f"{'':>{wide}}  {left}{right:>{_COLUMNS + 1 - len(left)}}  peak of the fullest rank")
    return "\n".join(lines)


def sweep_json(rows: Sequence[Swept]) -> dict[str, object]:
    """Return the rows as plain values: times in ns, memory in bytes."""
    front = best(rows)
    return {
        "rows": [
            {
                **row.words,
                "num_microbatches": row.num_microbatches or None,
                "value_ns": row.value_ns,
                "bound_ns": row.bound_ns,
                "peak_bytes": row.peak_bytes,
                "best": place in front,
                "refusal": row.refusal,
            }
            for place, row in enumerate(rows)
        ]
    }


def sweep_csv(rows: Sequence[Swept]) -> str:
    """Return the rows as CSV: a line of names, times in ns, memory in bytes."""
    out, front = io.StringIO(), best(rows)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*rows[0].words, "value_ns", "bound_ns", "peak_bytes", "best", "refusal"])
    for place, row in enumerate(rows):
        figures = ["" if n is None else n for n in (row.value_ns, row.bound_ns, row.peak_bytes)]
        writer.writerow([*row.words.values(), *figures, int(place in front), row.refusal])
    return out.getvalue()


def sweep_svg(rows: Sequence[Swept]) -> str:
    """Return the plot as SVG without fonts or scripts; a point under the mouse tells its figures."""
    points, front, unit = _places(rows), best(rows), _unit(rows)
    slow, fast = max(t for _, t, _ in points), min(t for _, t, _ in points)
    lean, full = min(b for _, _, b in points), max(b for _, _, b in points)
    right, low = _WIDE - _EDGE, _HIGH - _EDGE

    def at(each: float, held: int) -> tuple[int, int]:
        x = _EDGE + _scaled(held, lean, full, _WIDE - 2 * _EDGE)
        return x, low - _scaled(each, fast, slow, _HIGH - 2 * _EDGE)

    text = 'font-family="sans-serif" font-size="12" fill="#333"'
    lines = [
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" xmlns="http://www.w3.org/2000/svg">',
        f'<rect width="{_WIDE}" height="{_HIGH}" fill="#fff"/>',
        f'<path d="M{_EDGE} {_EDGE} V{low + 10} H{right}" fill="none" stroke="#333"/>',
        f'<text x="{_EDGE - 60}" y="{_EDGE - 20}" {text}>{escape(unit.name)} per microbatch</text>',
        f'<text x="{_EDGE - 6}" y="{_EDGE}" text-anchor="end" {text}>{unit.number(round(slow))}</text>',
        f'<text x="{_EDGE - 6}" y="{low}" text-anchor="end" {text}>{unit.number(round(fast))}</text>',
        f'<text x="{_EDGE}" y="{low + 30}" {text}>{format_bytes(lean)}</text>',
        f'<text x="{right}" y="{low + 30}" text-anchor="end" {text}>{format_bytes(full)}</text>',
        f'<text x="{_WIDE // 2}" y="{low + 50}" text-anchor="middle" {text}>peak of the fullest rank</text>',
    ]
    edge = sorted((held, each) for place, each, held in points if place in front)
    way = " L".join("{} {}".format(*at(each, held)) for held, each in edge)
    lines.append(f'<path d="M{way}" fill="none" stroke="#0072b2"/>')
    for place, each, held in points:
        x, y = at(each, held)
        words = " ".join(f"{name} {printable(word)}" for name, word in rows[place].words.items())
        title = f"{words}: {unit.text(round(each))} per microbatch, {format_bytes(held)}"
        shape = 'r="5" fill="#0072b2"' if place in front else 'r="4" fill="none" stroke="#777"'
        lines.append(f'<circle cx="{x}" cy="{y}" {shape}><title>{escape(title)}</title></circle>')
    return "\n".join([*lines, "</svg>", ""])
