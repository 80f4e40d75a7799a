"""Lanes: turns times into character cells, to scale. A lane is one line of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text

from zbcompile.schedule.ir import Action, Kind
from zbcompile.show.palette import BLOCKS, Glyphs, fill_of, heat, ink, paint

__all__ = ["Box", "Transfer", "Window", "bar_lane", "memory_lane", "message_lane"]

_GAP = Style(color="#7a6070", dim=True)
_LABEL = Style(color="#101418", bold=True)


@dataclass(frozen=True, slots=True)
class Box:
    """A compute action with its times.

    Attributes
    ----------
    local_stage
        Index of the action's stage among the stages of its rank.
    """

    action: Action
    start_ns: int
    end_ns: int
    local_stage: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message with its times, drawn on its sender's rank.

    Attributes
    ----------
    backward
        False for an activation, True for a gradient.
    """

    backward: bool
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Window:
    """The part of time that is drawn.

    Inside a picture times are multiplied by the number of columns, so that column edges are whole numbers.

    Attributes
    ----------
    first_ns, last_ns
        The times at the left and right edge.
    columns
        Width of the picture in character cells.
    """

    first_ns: int
    last_ns: int
    columns: int

    def scaled(self, time_ns: int) -> int:
        """Return a time in the picture's own unit, zero at its left edge."""
        return (time_ns - self.first_ns) * self.columns

    def edge(self, column: int) -> int:
        """Return a column's left edge in the picture's own unit."""
        return column * (self.last_ns - self.first_ns)

    def column(self, time_ns: int) -> int:
        """Return the column that holds a time, kept inside the picture."""
        length = max(1, self.last_ns - self.first_ns)
        return min(self.columns - 1, max(0, (time_ns - self.first_ns) * self.columns // length))


def bar_lane(boxes: Sequence[Box], window: Window, glyphs: Glyphs, *, colour: bool) -> Text:
    """Draw the compute actions of a rank, with idle time between them.

    Parameters
    ----------
    boxes
        The actions in order of time.
    """
    cells = list(_cells(boxes, window))
    return _coloured(cells, boxes, glyphs) if colour else _plain(cells, boxes, glyphs)


Cell = list[tuple[int, int]]
"""The parts of a cell in order of time: (index of the box or -1 for idle, its length inside the cell)."""


def _cells(boxes: Sequence[Box], window: Window) -> Iterable[Cell]:
    starts = [window.scaled(box.start_ns) for box in boxes]
    ends = [window.scaled(box.end_ns) for box in boxes]
    k = 0
    for column in range(window.columns):
        left, right = window.edge(column), window.edge(column + 1)
        while k < len(boxes) and ends[k] <= left:
            k += 1
        cell: Cell = []
        at, j = left, k
        while j < len(boxes) and starts[j] < right:
            start, end = max(left, starts[j]), min(right, ends[j])
            if start > at:
                cell.append((-1, start - at))
            if end > start:
                cell.append((j, end - start))
            at = max(at, end)
            j += 1
        if at < right:
            cell.append((-1, right - at))
        yield cell


def _main(cell: Cell) -> int:
    return max(cell, key=lambda part: part[1])[0] if cell else -1


def _whole(cells: Sequence[Cell]) -> dict[int, list[int]]:
    """Return for each box the columns that it fills by three quarters at least: its label fits there."""
    found: dict[int, list[int]] = {}
    for column, cell in enumerate(cells):
        index, length = max(cell, key=lambda part: part[1], default=(-1, 0))
        if index >= 0 and 4 * length >= 3 * sum(part for _, part in cell):
            found.setdefault(index, []).append(column)
    return found


def _label(action: Action, columns: int) -> str:
    """Return what fits: letter and microbatch, or the microbatch with a space beside it, or nothing."""
    number = str(action.microbatch)
    if len(action.kind.letter + number) <= columns:
        return action.kind.letter + number
    return number if len(number) < columns else ""


def _coloured(cells: Sequence[Cell], boxes: Sequence[Box], glyphs: Glyphs) -> Text:
    letters: dict[int, tuple[str, Style]] = {}
    for index, columns in _whole(cells).items():
        action = boxes[index].action
        label = _label(action, len(columns))
        first = columns[0] + (len(columns) - len(label)) // 2
        style = Style(bgcolor=paint(action, boxes[index].local_stage)) + _LABEL
        letters.update({first + k: (letter, style) for k, letter in enumerate(label)})
    lane = Text(end="")
    for column, cell in enumerate(cells):
        lane.append(*letters.get(column) or _blend(cell, boxes, glyphs))
    return lane


def _blend(cell: Cell, boxes: Sequence[Box], glyphs: Glyphs) -> tuple[str, Style]:
    """Draw a cell in one colour, or in the two that fill most of it, split at the nearest eighth."""
    most = sorted(sorted(range(len(cell)), key=lambda k: -cell[k][1])[:2])
    parts = [cell[k] for k in most]
    colours = [paint(boxes[i].action, boxes[i].local_stage) if i >= 0 else None for i, _ in parts]
    if not parts or colours == [None] or colours == [None, None]:
        return glyphs.gap, _GAP
    if len(parts) == 1 or colours[0] == colours[1]:
        return " ", Style(bgcolor=colours[0])
    eighth = round(8 * parts[0][1] / (parts[0][1] + parts[1][1]))
    left, right = colours
    if eighth in (0, 8):
        chosen = right if eighth == 0 else left
        return (" ", Style(bgcolor=chosen)) if chosen else (glyphs.gap, _GAP)
    if left is None:
        return BLOCKS[eighth], Style(color=right, reverse=True)
    return BLOCKS[eighth], Style(color=left, bgcolor=right)


def _plain(cells: Sequence[Cell], boxes: Sequence[Box], glyphs: Glyphs) -> Text:
    owners = [_main(cell) for cell in cells]
    line, column = "", 0
    while column < len(owners):
        end = column
        while end < len(owners) and owners[end] == owners[column]:
            end += 1
        if owners[column] < 0:
            line += glyphs.gap * (end - column)
        else:
            action = boxes[owners[column]].action
            label = f"{action.kind.letter}{action.microbatch}"
            if len(label) > end - column:
                label = action.kind.letter[: end - column]
            line += label + fill_of(action.kind, glyphs) * (end - column - len(label))
        column = end
    return Text(line, end="")


def memory_lane(
    steps: Sequence[tuple[int, int]],
    base: int,
    limit: int,
    window: Window,
    glyphs: Glyphs,
    *,
    colour: bool,
    capped: bool = True,
) -> Text:
    """Draw the highest memory of each column as a level between 0 and ``limit`` bytes.

    Parameters
    ----------
    steps
        (time in ns, bytes held from then on), in order of time.
    base
        Bytes held before the first step.
    limit
        Bytes at which a level is full.
    capped
        Whether the limit is a cap: then levels near it are coloured.
    """
    lane = Text(end="")
    held, k = base, 0
    while k < len(steps) and steps[k][0] < window.first_ns:
        held, k = steps[k][1], k + 1
    for column in range(window.columns):
        high, right = held, window.edge(column + 1)
        while k < len(steps) and window.scaled(steps[k][0]) < right:
            held, k = steps[k][1], k + 1
            high = max(high, held)
        share = high / limit if limit else 0.0
        level = min(8, -(-8 * high // limit)) if limit else 0
        glyph = glyphs.levels[level - 1] if level > 0 else " "
        lane.append(glyph, Style(color=heat(share if capped else 0.0)) if colour else Style.null())
    return lane


def message_lane(transfers: Iterable[Transfer], window: Window, glyphs: Glyphs, *, colour: bool) -> Text:
    """Draw messages, both directions in one line: an arrow where one arrives, a wire before it."""
    arrivals: dict[Kind, set[int]] = {Kind.SEND_F: set(), Kind.SEND_B: set()}
    wires: dict[Kind, set[int]] = {Kind.SEND_F: set(), Kind.SEND_B: set()}
    for transfer in transfers:
        if transfer.end_ns < window.first_ns or transfer.start_ns > window.last_ns:
            continue
        last = window.column(max(transfer.start_ns, transfer.end_ns - 1))
        kind = Kind.SEND_B if transfer.backward else Kind.SEND_F
        wires[kind].update(range(window.column(transfer.start_ns), last))
        arrivals[kind].add(last)
    lane = Text(end="")
    for column in range(window.columns):
        arrived = [kind for kind in arrivals if column in arrivals[kind]]
        travelling = [kind for kind in wires if column in wires[kind]]
        lane.append(*_signal(arrived, travelling, glyphs, colour))
    return lane


def _signal(arrived: list[Kind], travelling: list[Kind], glyphs: Glyphs, colour: bool) -> tuple[str, Style]:
    """Return what a column shows: arrivals before wires, activations before gradients."""
    if len(arrived) == 2:
        return glyphs.both, Style.null()
    if not arrived and not travelling:
        return " ", Style.null()
    kind = (arrived or travelling)[0]
    head = glyphs.forward if kind is Kind.SEND_F else glyphs.backward
    return head if arrived else glyphs.wire, ink(kind) if colour else Style.null()
