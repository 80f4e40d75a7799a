"""The picture of a timed order: head, time axis, per rank its work, messages and memory, and a legend."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from textwrap import wrap

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.style import Style
from rich.text import Text

from zbcompile.errors import printable
from zbcompile.formats.measured_json import Measured
from zbcompile.schedule.critical_path import critical_path
from zbcompile.schedule.simulate import Timeline
from zbcompile.schedule.steady import Steady
from zbcompile.show.boxes import has_messages, measured_boxes, memory_steps, planned_boxes, transfers_of
from zbcompile.show.choice import Lanes, chosen_ranks, fitting_lanes
from zbcompile.show.head import head_lines
from zbcompile.show.lanes import Box, Transfer, bar_lane, is_coarse, memory_lane, message_lane, path_lane
from zbcompile.show.legend import Legend
from zbcompile.show.notes import Notes
from zbcompile.show.once_lane import once_lane, once_times
from zbcompile.show.palette import ASCII, UNICODE, Glyphs
from zbcompile.show.scale import Scale
from zbcompile.show.summary import Summary, kind_means
from zbcompile.show.units import format_bytes, time_unit

__all__ = ["Picture", "View", "least_columns"]

_DIM = Style(dim=True)
_BOLD = Style(bold=True)
_LEAST_COLUMNS, _NARROWEST = 12, 20
_OTHER_LINES = 5
"""Names of the parts, axis, path, and two empty lines."""
_MEASURED_LINES = 6
"""Planned against measured, below the picture."""
_LONG = 40
"""Lines of a picture after which the headline is said again, where no screen says how many it holds."""


@dataclass(frozen=True, slots=True)
class View:
    """What to draw.

    Attributes
    ----------
    window
        First and last time in ns; None for all.
    memory, messages
        Whether to draw these lanes; None decides by the room and by what there is to show.
    ranks
        The ranks to draw; None for those that fit.
    follow
        The microbatch that stands out; None for all alike.
    fold
        Whether one period of the steady state stands for all; None where actions have no room otherwise.
    lines
        Lines of the screen; None for any number.
    """

    window: tuple[int, int] | None = None
    memory: bool | None = None
    messages: bool | None = None
    ranks: tuple[int, ...] | None = None
    follow: int | None = None
    fold: bool | None = None
    lines: int | None = None


@dataclass(frozen=True)
class Picture:
    """A rich renderable: ``console.print(Picture(summary))``.

    It fits any width. Without colour it tells the kinds apart by letters.

    Attributes
    ----------
    summary
        The timed order to draw.
    view
        Which part of it.
    measured
        A measured step to draw under the planned one.
    """

    summary: Summary
    view: View = View()
    measured: Measured | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        colour = console.color_system is not None and not console.no_color
        glyphs = ASCII if options.ascii_only else UNICODE
        yield Group(*_Drawing(self, options.max_width, glyphs, colour).parts())

    @cached_property
    def path(self) -> list[tuple[int, int]]:
        """(rank, position) of the actions on the critical path."""
        return critical_path(self.summary.event_graph(), self.summary.timeline)


def _holder(timeline: Timeline) -> str:
    """Say what holds ranks under the send mode of an order."""
    return "an exchange" if timeline.problem.sends.joins_exchange else "a send"


def least_columns(num_ranks: int) -> int:
    """Return the least width at which no line of a picture has to be broken: a rank's name and its lane."""
    return max(_NARROWEST, _name_columns(num_ranks) + _LEAST_COLUMNS)


def _name_columns(num_ranks: int) -> int:
    return len(f"rank {num_ranks - 1} ")


class _Drawing:
    """One picture at one width."""

    def __init__(self, picture: Picture, width: int, glyphs: Glyphs, colour: bool) -> None:
        self.summary, self.view, self.measured = picture.summary, picture.view, picture.measured
        self.timeline: Timeline = picture.summary.timeline
        self.glyphs, self.colour, self.width = glyphs, colour, width
        self.path = picture.path
        self.once = [once_times(self.timeline, r) for r in range(self.timeline.schedule.num_ranks)]
        ranks = self.timeline.schedule.num_ranks
        self.left = _name_columns(ranks)
        self.notes = Notes.of(self.summary)
        room = width - self.left
        self.right = self.notes.width if room - self.notes.width >= 3 * _LEAST_COLUMNS else 0
        longest = max(self.timeline.makespan_ns, self.measured.makespan_ns if self.measured else 0)
        columns = max(_LEAST_COLUMNS, room - self.right)
        fold = False if self.measured is not None else self.view.fold
        self.scale = Scale.of(self.timeline, longest, columns, self.view.window, fold)
        self.head = [self._line(text, style) for text, style in head_lines(self.summary)]
        everybody = self.view.ranks or range(ranks)
        self.lanes, most = self._room(len(everybody))
        self.ranks = list(everybody) if self.view.ranks else chosen_ranks(self.timeline, most)
        critical = frozenset(self.path)
        self.boxes = {
            r: planned_boxes(self.timeline, r, self.scale.windows, critical, self.view.follow)
            for r in self.ranks
        }
        self.transfers = self._transfers()

    def parts(self) -> Iterator[Text]:
        """Yield all lines from top to bottom."""
        lines = [*self.head, Text(), *self._axis()]
        for rank in self.ranks:
            lines += self._rank(rank)
            if self.lanes.airy and rank != self.ranks[-1]:
                lines.append(Text())
        lines += [*self._path(), *self._left_out(), Text(), *self._legend_lines()]
        if self.measured is not None:
            lines += self._measured_lines(self.measured)
        yield from lines
        if len(lines) > (self.view.lines or _LONG):
            yield self.head[0]

    def _room(self, ranks: int) -> tuple[Lanes, int]:
        """Return the lanes of every rank, and how many ranks fit on the screen."""
        view, measured = self.view, self.measured is not None
        messages = False if measured or not has_messages(self.timeline) else view.messages
        memory = False if measured or not self.summary.has_profile else view.memory
        bars = 1 + measured + any(self.once)
        if view.lines is None:
            return fitting_lanes(ranks, None, messages, memory, bars), ranks
        self.lanes = Lanes(messages is not False, memory is not False, False, bars)
        self.boxes, self.ranks = {}, []  # the legend is measured with all lanes, and without ranks
        taken = sum(len(wrap(line.plain, self.width)) for line in self.head) + len(list(self._legend_lines()))
        lines = max(1, view.lines - taken - _OTHER_LINES - (_MEASURED_LINES if measured else 0))
        lanes = fitting_lanes(ranks, lines, messages, memory, bars)
        most = (lines + lanes.airy) // lanes.each
        return lanes, most if most >= ranks else (lines - 1) // lanes.each

    def _line(self, text: str, style: Style | None = None) -> Text:
        return Text(self._safe(text), style=style if self.colour and style else Style.null(), overflow="fold")

    def _safe(self, text: str) -> str:
        """Return the text in characters that the terminal can show, and none that it obeys."""
        text = printable(text)
        if self.glyphs is not ASCII:
            return text
        return text.translate({0xB7: "|", 0xB5: "u"}).encode("ascii", "replace").decode()

    def _axis(self) -> Iterator[Text]:
        names = self.scale.names(self.glyphs.wall)
        if names.strip():
            yield self._line(" " * self.left + names, _DIM)
        marks = self.scale.marks(self.summary.unit, self.glyphs.tick)
        yield self._line(" " * self.left + marks + (self.notes.title if self.right else ""), _DIM)

    def _rank(self, rank: int) -> Iterator[Text]:
        yield self._lane(f"rank {rank}", self._bars(self.boxes[rank]), self.notes.planned(rank))
        if self.measured is not None:
            boxes = measured_boxes(self.timeline, self.measured, rank, self.view.follow)
            note = self.notes.measured(self.measured, rank)
            yield self._lane("  real", self._bars(boxes), note, dim=True)
        if any(self.once):
            yield self._lane("  once", self._once(rank), dim=True)
        if self.lanes.messages:
            yield self._lane("  send", self._messages(self.transfers[rank]), dim=True)
        if self.lanes.memory:
            yield self._lane("  mem", self._memory(rank), dim=True)

    def _lane(self, name: str, lane: Text, note: str = "", *, dim: bool = False) -> Text:
        """Return a line with its name, its lane and a note; ``dim`` is for the name."""
        line = Text(no_wrap=True, overflow="crop")
        line.append(name.ljust(self.left)[: self.left], _DIM if self.colour and dim else Style.null())
        line.append_text(lane)
        if self.right and note:
            line.append(note, _DIM if self.colour else Style.null())
        return line

    def _joined(self, parts: Sequence[Text]) -> Text:
        """Return the parts of a lane with a wall between them."""
        lane = Text(end="")
        for part in parts:
            if lane:
                lane.append(self.glyphs.wall, _DIM if self.colour else Style.null())
            lane.append_text(part)
        return lane

    def _bars(self, boxes: Sequence[Box]) -> Text:
        windows = self.scale.windows
        return self._joined([bar_lane(boxes, w, self.glyphs, colour=self.colour) for w in windows])

    def _once(self, rank: int) -> Text:
        windows, times = self.scale.windows, self.once[rank]
        return self._joined([once_lane(times, w, self.glyphs, colour=self.colour) for w in windows])

    def _messages(self, transfers: Sequence[Transfer]) -> Text:
        windows = self.scale.windows
        return self._joined([message_lane(transfers, w, self.glyphs, colour=self.colour) for w in windows])

    def _transfers(self) -> list[list[Transfer]]:
        """Return per rank the messages that it sends."""
        if not self.lanes.messages:
            return []
        return [[t for _, t in row] for row in transfers_of(self.timeline, self.view.follow)]

    def _memory(self, rank: int) -> Text:
        timeline, problem = self.timeline, self.timeline.problem
        cap, base = problem.caps[rank], problem.static_bytes(rank)
        limit = max(timeline.peak_bytes) if cap is None else cap
        steps, capped = memory_steps(timeline, rank), cap is not None
        return self._joined(
            [
                memory_lane(steps, base, limit, w, self.glyphs, colour=self.colour, capped=capped)
                for w in self.scale.windows
            ]
        )

    def _path(self) -> Iterator[Text]:
        if not self.path:
            return
        start, end = self.timeline.start, self.timeline.end
        stays = [(r, start[r][k], end[r][k]) for r, k in self.path]
        parts = [Text(path_lane(stays, w, self.glyphs)) for w in self.scale.windows]
        yield self._lane("path", self._joined(parts), dim=True)

    def _left_out(self) -> Iterator[Text]:
        left = self.timeline.schedule.num_ranks - len(self.ranks)
        if not left:
            return
        words = f"{left} of {self.timeline.schedule.num_ranks} ranks left out"
        if self.view.ranks is None:
            words += " (drawn: first, last, most idle, some); --ranks all"
        yield self._line(words, _DIM)

    def _legend_lines(self) -> Iterator[Text]:
        line = Text()
        for item in self._legend().items(self.glyphs, self.colour):
            if line.cell_len and line.cell_len + 3 + item.cell_len > self.width:
                yield line
                line = Text()
            line.append("   " if line.cell_len else "")
            line.append_text(item)
        yield line
        steady = self.scale.steady
        if steady is not None:
            unit = self.summary.unit
            if self.summary.has_profile:
                unit = time_unit(steady.period_ns)
            words = f"steady state: one of {steady.repeats} periods of {unit.text(steady.period_ns)} is drawn"
            yield self._line(words + (", with more held each time" if self._grows(steady) else ""), _DIM)

    def _grows(self, steady: Steady) -> bool:
        """Return whether a rank holds other bytes after a period of the steady state than before it."""
        last = steady.first_ns + steady.period_ns
        for rank in range(self.timeline.schedule.num_ranks):
            steps = memory_steps(self.timeline, rank)
            before, after = (bisect_left(steps, time, key=itemgetter(0)) for time in (steady.first_ns, last))
            if steps[before - 1][1] != steps[after - 1][1]:
                return True
        return False

    def _legend(self) -> Legend:
        timeline, caps, peaks = self.timeline, self.timeline.problem.caps, self.timeline.peak_bytes
        windows, boxes = self.scale.windows, list(self.boxes.values())
        limits = {cap for cap in caps if cap is not None}
        full = "the highest peak"
        if limits:
            full = f"the cap of {format_bytes(min(limits))}" if len(limits) == 1 else "the rank's cap"
        return Legend(
            kinds=frozenset(a.kind for row in timeline.schedule.order for a in row if a.kind.is_compute),
            stages=max(len(timeline.problem.placement.stages_of(r)) for r in range(len(caps))),
            messages=self.lanes.messages,
            held=_holder(timeline) if any(not b.action.kind.is_compute for row in boxes for b in row) else "",
            path=bool(self.path),
            coarse=any(is_coarse(row, w) for row in boxes for w in windows),
            memory=full if self.lanes.memory else "",
            capped=bool(limits),
            over=any(cap is not None and peak > cap for peak, cap in zip(peaks, caps, strict=True)),
            follow=self.view.follow,
            once="".join(dict.fromkeys(once.letter for row in self.once for once in row)),
        )

    def _measured_lines(self, measured: Measured) -> Iterator[Text]:
        unit, planned, real = self.summary.unit, self.timeline.makespan_ns, measured.makespan_ns
        over = real / planned - 1 if planned else 0.0
        yield Text()
        yield self._line(
            f"measured makespan {unit.text(real)}, planned {unit.text(planned)}: {100 * over:+.1f} %",
            _BOLD,
        )
        for kind, planned, real, count in kind_means(self.timeline, measured):
            share = f"{100 * (real / planned - 1):+.1f} %" if planned else "free in the plan"
            means = f"mean {unit.text(real)}, planned {unit.text(planned)}: {share}"
            yield self._line(f"  {kind.letter:<2} {count:>5} x  {means}")
