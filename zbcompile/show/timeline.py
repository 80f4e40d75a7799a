"""The picture of a timed order: head, time axis, per rank its work, messages and memory, and a legend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.style import Style
from rich.text import Text

from zbcompile.errors import printable
from zbcompile.formats.measured_json import Measured
from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.messages import Message, messages_of
from zbcompile.schedule.problem import Objective
from zbcompile.schedule.simulate import Timeline
from zbcompile.show.lanes import Box, Transfer, Window, bar_lane, memory_lane, message_lane
from zbcompile.show.palette import ASCII, UNICODE, Glyphs, fill_of, ink, paint
from zbcompile.show.summary import (
    Proof,
    Summary,
    cuts_line,
    gradients_line,
    headline,
    kind_means,
    memory_text,
    origin_words,
    proof_line,
)
from zbcompile.show.units import percent, ticks

__all__ = ["Picture", "View"]

_KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD_INPUT: "gradient of inputs",
    Kind.BACKWARD_WEIGHT: "gradient of weights",
    Kind.FULL_BACKWARD: "both, fused",
}
_DIM = Style(dim=True)
_BOLD = Style(bold=True)
_LEAST_COLUMNS = 12
_MANY_RANKS = 16
_AIRY_RANKS = 8


@dataclass(frozen=True, slots=True)
class View:
    """What to draw.

    Attributes
    ----------
    window
        First and last time in ns; None for all.
    memory, messages
        Whether to draw these lanes; None decides by the number of ranks and by what there is to show.
    """

    window: tuple[int, int] | None = None
    memory: bool | None = None
    messages: bool | None = None


@dataclass(frozen=True, slots=True)
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


class _Drawing:
    """One picture at one width."""

    def __init__(self, picture: Picture, width: int, glyphs: Glyphs, colour: bool) -> None:
        self.summary, self.view, self.measured = picture.summary, picture.view, picture.measured
        self.timeline: Timeline = picture.summary.timeline
        self.glyphs, self.colour, self.width = glyphs, colour, width
        p = self.timeline.schedule.num_ranks
        self.left = len(f"rank {p - 1} ")
        self.notes = [self._note(r) for r in range(p)]
        self.right = max(map(len, self.notes)) + 1
        if width - self.left - self.right < 3 * _LEAST_COLUMNS:
            self.right = 0
        longest = max(self.timeline.makespan_ns, self.measured.makespan_ns if self.measured else 0)
        first, last = self.view.window or (0, longest)
        columns = max(_LEAST_COLUMNS, width - self.left - self.right)
        self.window = Window(first, max(last, first + 1), columns)
        few, planned = p <= _MANY_RANKS, self.measured is None
        wanted = few if self.view.messages is None else self.view.messages
        self.transfers = self._transfers() if planned and wanted else []
        self.draws_messages = any(self.transfers)
        shown = few if self.view.memory is None else self.view.memory
        self.draws_memory = planned and shown and self.summary.has_profile

    def parts(self) -> Iterator[Text]:
        """Yield all lines from top to bottom."""
        yield from self._head()
        yield Text()
        yield self._axis()
        for rank in range(self.timeline.schedule.num_ranks):
            lines = list(self._rank(rank))
            yield from lines
            airy = len(lines) > 1 and self.timeline.schedule.num_ranks <= _AIRY_RANKS
            if airy or rank == self.timeline.schedule.num_ranks - 1:
                yield Text()
        yield from self._legend()
        if self.measured is not None:
            yield from self._measured_lines(self.measured)

    def _head(self) -> Iterator[Text]:
        summary, timeline, problem = self.summary, self.timeline, self.timeline.problem
        gain = summary.baseline.gain(timeline.value_ns)
        good = gain is not None and gain >= 0.0005
        yield self._line(headline(summary), Style(bold=True, color="#2bb584" if good else None))
        other: Objective = "makespan" if problem.objective == "span" else "span"
        lengths = [
            (name, timeline.length_ns(name), timeline.bubble(name)) for name in (problem.objective, other)
        ]
        yield self._line(
            " · ".join(
                f"{name} {summary.unit.text(length)}, bubble {percent(bubble)}"
                for name, length, bubble in lengths
            )
        )
        fault = summary.proof is Proof.OTHER_VALUE
        yield self._line(proof_line(summary), Style(bold=True, color="#e0303a") if fault else None)
        for line in (cuts_line(summary), gradients_line(summary)):
            if line:
                yield self._line(line)
        words = [
            _count(problem.num_ranks, "rank"),
            f"{_count(problem.num_stages, 'stage')}, {problem.placement.name}",
            _count(problem.num_microbatches, "microbatch", "microbatches"),
            f"{problem.transport} sends",
        ]
        if origin := origin_words(summary):
            words.append(origin)
        if not summary.has_profile:
            words.append("no profile: F = B = W = 1 unit")
        yield self._line(" · ".join(words), _DIM)

    def _line(self, text: str, style: Style | None = None) -> Text:
        return Text(self._safe(text), style=style if self.colour and style else Style.null(), overflow="fold")

    def _safe(self, text: str) -> str:
        """Return the text in characters that the terminal can show, and none that it obeys."""
        text = printable(text)
        if self.glyphs is not ASCII:
            return text
        return text.translate({0xB7: "|", 0xB5: "u"}).encode("ascii", "replace").decode()

    def _note(self, rank: int) -> str:
        whole = self.timeline.value_ns
        idle = 1.0 - self.timeline.busy_ns(rank) / whole if whole else 0.0
        memory = memory_text(self.summary, rank)
        return self._safe(f" idle {percent(idle)}" + (f" · {memory}" if memory else ""))

    def _axis(self) -> Text:
        window, unit = self.window, self.summary.unit
        marks = [" "] * window.columns
        widest = len(unit.number(window.last_ns)) + len(unit.name) + 3
        for time in ticks(window.first_ns, window.last_ns, max(2, window.columns // max(10, widest))):
            label = ("|" if self.glyphs is ASCII else "╷") + unit.number(time)
            column = window.column(time)
            if time == 0 or time == window.first_ns:
                label += f" {unit.name}"
            if column + len(label) <= window.columns and all(
                c == " " for c in marks[max(0, column - 1) : column]
            ):
                marks[column : column + len(label)] = label
        return self._line(" " * self.left + "".join(marks), _DIM)

    def _rank(self, rank: int) -> Iterator[Text]:
        yield self._lane(f"rank {rank}", self._bars(rank), self.notes[rank])
        if self.measured is not None:
            bars = self._measured_bars(self.measured, rank)
            yield self._lane("  real", bars, self._measured_note(self.measured, rank), dim=True)
            return
        if self.draws_messages:
            lane = message_lane(self.transfers[rank], self.window, self.glyphs, colour=self.colour)
            yield self._lane("  send", lane, dim=True)
        if self.draws_memory:
            yield self._lane("  mem", self._memory(rank), dim=True)

    def _lane(self, name: str, lane: Text, note: str = "", *, dim: bool = False) -> Text:
        """Return a line with its name, its lane and a note; ``dim`` is for the name."""
        line = Text(no_wrap=True, overflow="crop")
        line.append(name.ljust(self.left)[: self.left], _DIM if self.colour and dim else Style.null())
        line.append_text(lane)
        if self.right and note:
            line.append(note, _DIM if self.colour else Style.null())
        return line

    def _local_stages(self, rank: int) -> dict[int, int]:
        """Return the index of each stage among those of its rank; an action may stand on another rank."""
        return {s: k for k, s in enumerate(self.timeline.problem.placement.stages_of(rank))}

    def _bars(self, rank: int) -> Text:
        local = self._local_stages(rank)
        boxes = [
            Box(a, self.timeline.start[rank][k], self.timeline.end[rank][k], local.get(a.stage, 0))
            for k, a in enumerate(self.timeline.schedule.order[rank])
            if a.kind.is_compute
        ]
        return bar_lane(boxes, self.window, self.glyphs, colour=self.colour)

    def _measured_bars(self, measured: Measured, rank: int) -> Text:
        local = self._local_stages(rank)
        row = measured.ranks[rank] if rank < len(measured.ranks) else ()
        boxes = [
            Box(a, start, end, local.get(a.stage, 0))
            for a, start, end in sorted(row, key=lambda event: event[1])
            if a.kind.is_compute
        ]
        return bar_lane(boxes, self.window, self.glyphs, colour=self.colour)

    def _measured_note(self, measured: Measured, rank: int) -> str:
        whole = measured.makespan_ns
        if not whole or rank >= len(measured.ranks):
            return ""
        return f" idle {percent(1.0 - measured.busy_ns(rank) / whole)}"

    def _transfers(self) -> list[list[Transfer]]:
        """Return per rank the messages that it sends."""
        problem, times = self.timeline.problem, _times(self.timeline)
        found: list[list[Transfer]] = [[] for _ in range(problem.num_ranks)]
        for edge, message in messages_of(problem):
            if message.send in times:
                start, end = times[message.send]
            else:
                lag = problem.lag_ns(edge, backward=message.backward)
                if lag == 0:
                    continue
                ready = _ready(message, times)
                if ready is None:
                    continue
                start, end = ready, ready + lag
            rank = problem.placement.rank_of[message.source]
            found[rank].append(Transfer(message.backward, start, end))
        return found

    def _memory(self, rank: int) -> Text:
        timeline, problem = self.timeline, self.timeline.problem
        steps = [
            (
                timeline.start[rank][k] if a.kind is Kind.FORWARD else timeline.end[rank][k],
                timeline.memory[rank][k],
            )
            for k, a in enumerate(timeline.schedule.order[rank])
            if a.kind.is_compute
        ]
        cap, base = problem.caps[rank], problem.static_bytes(rank)
        limit = max(timeline.peak_bytes) if cap is None else cap
        return memory_lane(
            steps, base, limit, self.window, self.glyphs, colour=self.colour, capped=cap is not None
        )

    def _legend(self) -> Iterator[Text]:
        line = Text()
        for item in self._legend_items():
            if line.cell_len and line.cell_len + 3 + item.cell_len > self.width:
                yield line
                line = Text()
            line.append("   " if line.cell_len else "")
            line.append_text(item)
        yield line

    def _legend_items(self) -> Iterator[Text]:
        used = {a.kind for row in self.timeline.schedule.order for a in row}
        for kind, name in _KIND_NAMES.items():
            if kind in used:
                yield self._item(self._sample(kind), name)
        yield self._item(Text(self.glyphs.gap * 3), "bubble")
        if self.measured is not None:
            return
        if self.draws_messages:
            for glyph, kind, name in (
                (self.glyphs.forward, Kind.SEND_F, "activation"),
                (self.glyphs.backward, Kind.SEND_B, "gradient"),
            ):
                yield self._item(Text(glyph, ink(kind) if self.colour else Style.null()), f"{name} sent")
        if self.draws_memory:
            capped = any(cap is not None for cap in self.timeline.problem.caps)
            levels = "".join(self.glyphs.levels[k] for k in (2, 5, 7))
            yield self._item(Text(levels), "memory, full = " + ("the cap" if capped else "the highest peak"))
        if self.timeline.problem.num_stages > self.timeline.schedule.num_ranks and self.colour:
            yield Text("lighter: the rank's later stages")

    def _sample(self, kind: Kind) -> Text:
        if self.colour:
            return Text(
                f" {kind.letter} ", Style(color="#101418", bgcolor=paint(Action(kind, 0, 0), 0), bold=True)
            )
        return Text(kind.letter + 2 * fill_of(kind, self.glyphs))

    @staticmethod
    def _item(sample: Text, name: str) -> Text:
        return Text.assemble(sample, f" {name}")

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


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _times(timeline: Timeline) -> dict[Action, tuple[int, int]]:
    """Return start and end of every action."""
    return {a: (timeline.start[r][k], timeline.end[r][k]) for r, k, a in timeline.schedule.actions()}


def _ready(message: Message, times: Mapping[Action, tuple[int, int]]) -> int | None:
    """Return when the action that makes a message ends, or None where the order lacks it."""
    kinds = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD) if message.backward else (Kind.FORWARD,)
    made_by = (Action(kind, message.source, message.microbatch) for kind in kinds)
    return next((times[a][1] for a in made_by if a in times), None)
