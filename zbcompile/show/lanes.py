"""Lanes: turns times into character cells, to scale. A lane is one line of text, in parts of the step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.style import Style
from rich.text import Text

from zbcompile.schedule.ir import Action, Kind
from zbcompile.show.palette import Glyphs, fill_of, heat, ink, letter_of, paint
from zbcompile.show.scale import Window

__all__ = ["Box", "Transfer", "bar_lane", "is_coarse", "memory_lane", "message_lane", "path_lane"]

_GAP = Style(color="#7a6070", dim=True)
_DARK = "#101418"
_LABEL = Style(color=_DARK, bold=True)


@dataclass(frozen=True, slots=True)
class Box:
    """A stretch of a rank's time: a compute action, or the time that a send holds the rank.

    Attributes
    ----------
    action
        The compute action, or the send.
    local_stage, stages
        Index of the action's stage among the stages of its rank, and how many these are.
    critical
        Whether it is on the critical path.
    dim
        Whether it is of a microbatch that is not followed.
    """

    action: Action
    start_ns: int
    end_ns: int
    local_stage: int = 0
    stages: int = 1
    critical: bool = False
    dim: bool = False

    @property
    def colour(self) -> str:
        """Its colour."""
        return paint(self.action, self.local_stage, self.stages, dim=self.dim)


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


def is_coarse(boxes: Sequence[Box], window: Window) -> bool:
    """Return whether a part of the step has more actions of a rank than columns."""
    return len(_within(boxes, window)) > window.columns


def _within(boxes: Sequence[Box], window: Window) -> Sequence[Box]:
    """Return the boxes of a part of the step."""
    first = bisect_right(boxes, window.first_ns, key=lambda box: box.end_ns)
    return boxes[first : bisect_left(boxes, window.last_ns, lo=first, key=lambda box: box.start_ns)]


def bar_lane(boxes: Sequence[Box], window: Window, glyphs: Glyphs, *, colour: bool) -> Text:
    """Draw what a rank does in a part of the step, with idle time between.

    Where it does more than there are columns, the columns show kinds of actions in their proportion.

    Parameters
    ----------
    boxes
        Its stretches of time, in order of time.
    """
    boxes = _within(boxes, window)
    cells = list(_cells(boxes, window))
    if len(boxes) > window.columns:
        return _proportions(cells, boxes, glyphs, colour)
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


def _mostly(cells: Sequence[Cell]) -> dict[int, list[int]]:
    """Return for each box the columns that it fills by half at least: its label fits there."""
    found: dict[int, list[int]] = {}
    for column, cell in enumerate(cells):
        index, length = max(cell, key=lambda part: part[1], default=(-1, 0))
        if index >= 0 and 2 * length >= sum(part for _, part in cell):
            found.setdefault(index, []).append(column)
    return found


def _label(box: Box, columns: int) -> str:
    """Return what fits beside the colour: letter and microbatch, or the microbatch, or nothing."""
    if not box.action.kind.is_compute or box.dim:
        return ""
    number = str(box.action.microbatch)
    if len(box.action.kind.letter + number) <= columns:
        return box.action.kind.letter + number
    return number if len(number) <= columns else ""


def _coloured(cells: Sequence[Cell], boxes: Sequence[Box], glyphs: Glyphs) -> Text:
    letters: dict[int, tuple[str, Style]] = {}
    for index, columns in _mostly(cells).items():
        box = boxes[index]
        label = _label(box, len(columns))
        first = columns[0] + (len(columns) - len(label)) // 2
        style = Style(bgcolor=box.colour, underline=box.critical or None) + _LABEL
        letters.update({first + k: (letter, style) for k, letter in enumerate(label)})
    lane = Text(end="")
    for column, cell in enumerate(cells):
        lane.append(*letters.get(column) or _blend(cell, boxes, glyphs))
    return lane


def _blend(cell: Cell, boxes: Sequence[Box], glyphs: Glyphs) -> tuple[str, Style]:
    """Draw a cell in one colour, or in the two that fill most of it, split at the nearest eighth."""
    most = sorted(sorted(range(len(cell)), key=lambda k: -cell[k][1])[:2])
    parts = [cell[k] for k in most]
    colours = [boxes[i].colour if i >= 0 else None for i, _ in parts]
    if not parts or colours == [None] or colours == [None, None]:
        return glyphs.gap, _GAP
    if len(parts) == 1 or colours[0] == colours[1]:
        return _filled(boxes[parts[0][0]], glyphs)
    eighth = round(8 * parts[0][1] / (parts[0][1] + parts[1][1]))
    if not glyphs.blocks:
        eighth = 8 if eighth >= 4 else 0
    left, right = colours
    if eighth in (0, 8):
        index = parts[1 if eighth == 0 else 0][0]
        return _filled(boxes[index], glyphs) if index >= 0 else (glyphs.gap, _GAP)
    if left is None:
        return glyphs.blocks[eighth], Style(color=right, reverse=True)
    return glyphs.blocks[eighth], Style(color=left, bgcolor=right)


def _filled(box: Box, glyphs: Glyphs) -> tuple[str, Style]:
    """Draw a cell that one box fills: held time hatched, the critical path with a line along its foot."""
    if not box.action.kind.is_compute:
        return glyphs.held, Style(color=box.colour)
    if box.critical:
        return glyphs.foot, Style(color=_DARK, bgcolor=box.colour)
    return " ", Style(bgcolor=box.colour)


def _plain(cells: Sequence[Cell], boxes: Sequence[Box], glyphs: Glyphs) -> Text:
    owners = [_main(cell) for cell in cells]
    line, column = "", 0
    while column < len(owners):
        end = column
        while end < len(owners) and owners[end] == owners[column]:
            end += 1
        box = boxes[owners[column]] if owners[column] >= 0 else None
        line += glyphs.gap * (end - column) if box is None else _word(box, end - column, glyphs)
        column = end
    return Text(line, end="")


def _word(box: Box, columns: int, glyphs: Glyphs) -> str:
    """Write a box without colour: letter and microbatch, or the letter, stretched to its columns."""
    sign = _sign(box, glyphs)
    if not box.action.kind.is_compute or box.dim:
        return sign * columns
    number = str(box.action.microbatch)
    labels = (letter_of(box.action, box.local_stage) + number, sign + number, sign)
    label = next(label for label in labels if len(label) <= columns)
    return label + fill_of(box.action.kind, glyphs) * (columns - len(label))


def _sign(box: Box, glyphs: Glyphs) -> str:
    """Return the one character that stands for a box without colour."""
    kind = box.action.kind
    if not kind.is_compute:
        return glyphs.held
    if box.dim:
        return glyphs.dimmed
    return fill_of(kind, glyphs) if kind is Kind.FULL_BACKWARD else letter_of(box.action, box.local_stage)


def _proportions(cells: Sequence[Cell], boxes: Sequence[Box], glyphs: Glyphs, colour: bool) -> Text:
    """Draw cells that hold several actions: along the lane, every kind gets as many columns as its time.

    What a column cannot show is carried to the next, so that no kind hides the others.
    """
    lane, owed = Text(end=""), dict[tuple[Kind, int, bool] | None, int]()
    samples: dict[tuple[Kind, int, bool], Box] = {}
    for cell in cells:
        whole = 0
        for index, length in cell:
            key = None
            if index >= 0:
                box = boxes[index]
                key = (box.action.kind, box.local_stage, box.dim)
                samples.setdefault(key, box)
            owed[key] = owed.get(key, 0) + (2 if colour else 1) * length
            whole += length
        chosen = []
        for _ in range(2 if colour else 1):
            key = max(owed, key=lambda k: owed[k])
            owed[key] -= whole
            chosen.append(None if key is None else samples[key])
        lane.append(*_halves(chosen[0], chosen[-1], glyphs) if colour else _letter(chosen[0], glyphs))
    return lane


def _letter(box: Box | None, glyphs: Glyphs) -> tuple[str, Style]:
    return glyphs.gap if box is None else _sign(box, glyphs), Style.null()


def _halves(left: Box | None, right: Box | None, glyphs: Glyphs) -> tuple[str, Style]:
    """Draw a cell in two halves."""
    colours = [
        None
        if box is None
        else paint(Action(box.action.kind, 0, 0), box.local_stage, box.stages, dim=box.dim)
        if box.action.kind.is_compute
        else box.colour
        for box in (left, right)
    ]
    if colours == [None, None] or (colours[0] is None and not glyphs.blocks):
        return glyphs.gap, _GAP
    if colours[0] is None:
        return glyphs.blocks[4], Style(color=colours[1], reverse=True)
    if colours[0] == colours[1] or not glyphs.blocks:
        return " ", Style(bgcolor=colours[0])
    return glyphs.blocks[4], Style(color=colours[0], bgcolor=colours[1])


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
        glyph = glyphs.over if share > 1.0 else glyphs.levels[level - 1] if level > 0 else " "
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


def path_lane(stays: Sequence[tuple[int, int, int]], window: Window, glyphs: Glyphs) -> str:
    """Draw the critical path of a part of the step: on which rank it is, and where it goes up or down.

    Parameters
    ----------
    stays
        (rank, start, end) of its actions in ns, in order of time. Between them a message is on its way.
    """
    begins, over = window.scaled(stays[0][1]), window.scaled(stays[-1][2])
    line, stays = "", [stay for stay in stays if stay[2] > window.first_ns and stay[1] < window.last_ns]
    ranks = [_rank_at(stays, window, column) for column in range(window.columns)]
    ends = [0, *(k for k, (a, b) in enumerate(pairwise(ranks), 1) if a != b), window.columns]
    before: int | None = None
    for start, end in pairwise(ends):
        rank, columns = ranks[start], end - start
        if rank is None:
            outside = window.edge(end) <= begins or window.edge(start) >= over
            line += (" " if outside else glyphs.wire) * columns
            continue
        label, slope = str(rank), glyphs.chain
        if before is not None and rank != before:
            slope = glyphs.down if rank > before else glyphs.up
        fits = len(label) < columns + (before is None)
        line += label + glyphs.chain * (columns - len(label)) if fits else slope * columns
        before = rank
    return line


def _rank_at(stays: Sequence[tuple[int, int, int]], window: Window, column: int) -> int | None:
    """Return the rank that the path is on for most of a column; None while a message travels."""
    left, right = window.edge(column), window.edge(column + 1)
    shares: dict[int, int] = {}
    first = bisect_right(stays, left, key=lambda stay: window.scaled(stay[2]))
    for rank, start, end in stays[first:]:
        if window.scaled(start) >= right:
            break
        share = min(right, window.scaled(end)) - max(left, window.scaled(start))
        shares[rank] = shares.get(rank, 0) + share
    return max(shares, key=lambda rank: shares[rank], default=None)
