"""The picture of a plan: head, time axis, per rank the work, its messages and its memory, and a legend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.style import Style
from rich.text import Text

from zbcompile.formats.measured_json import Measured
from zbcompile.schedule.event_graph import Message as Sent
from zbcompile.schedule.event_graph import messages_of
from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.simulate import Timeline, action_times
from zbcompile.show.lanes import Box, Message, Window, bar_lane, memory_lane, message_lane
from zbcompile.show.palette import ASCII, UNICODE, Glyphs, fill_of, ink, paint
from zbcompile.show.summary import Plan, headline, kind_means, memory_text, proof_line
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

    window : first and last time in ns, None for all. memory, messages : which lanes; None decides by
        the number of ranks and by what there is to show.
    """

    window: tuple[int, int] | None = None
    memory: bool | None = None
    messages: bool | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """A rich renderable: ``console.print(Picture(plan))``. Fits any width; without colour it uses letters."""

    plan: Plan
    view: View = View()
    measured: Measured | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        colour = console.color_system is not None and not console.no_color
        glyphs = ASCII if options.ascii_only else UNICODE
        yield Group(*_Drawing(self, options.max_width, glyphs, colour).parts())


class _Drawing:
    """One picture at one width."""

    def __init__(self, picture: Picture, width: int, glyphs: Glyphs, colour: bool) -> None:
        self.plan, self.view, self.measured = picture.plan, picture.view, picture.measured
        self.timeline: Timeline = picture.plan.timeline
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
        self.sent = self._messages() if planned and wanted else []
        self.draws_messages = any(self.sent)
        shown = few if self.view.memory is None else self.view.memory
        self.draws_memory = planned and shown and self.plan.has_profile

    def parts(self) -> Iterator[Text]:
        """All lines from top to bottom."""
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
            yield from self._measured_lines()

    def _head(self) -> Iterator[Text]:
        plan, timeline, problem = self.plan, self.timeline, self.timeline.problem
        gain = plan.baseline.gain(timeline.value_ns)
        good = gain is not None and gain >= 0.0005
        yield self._line(headline(plan), Style(bold=True, color="#2bb584" if good else None))
        other = "makespan" if problem.objective == "span" else "span"
        values = {"span": timeline.span_ns, "makespan": timeline.makespan_ns}
        yield self._line(
            " · ".join(
                f"{name} {plan.unit.text(values[name])}, bubble {percent(timeline.bubble(name))}"
                for name in (problem.objective, other)
            )
        )
        proof = proof_line(plan)
        fault = "proves nothing" in proof
        yield self._line(proof, Style(bold=True, color="#e0303a") if fault else None)
        words = [
            _count(problem.num_ranks, "rank"),
            f"{_count(problem.num_stages, 'stage')}, {problem.placement.name}",
            _count(problem.num_microbatches, "microbatch", "microbatches"),
            f"{problem.transport} sends",
        ]
        if plan.origin:
            words.append(plan.origin)
        if not plan.has_profile:
            words.append("no profile: F = B = W = 1 unit")
        yield self._line(" · ".join(words), _DIM)

    def _line(self, text: str, style: Style | None = None) -> Text:
        return Text(self._safe(text), style=style if self.colour and style else Style.null(), overflow="fold")

    def _safe(self, text: str) -> str:
        """Text that the terminal can show."""
        if self.glyphs is not ASCII:
            return text
        return text.translate({0xB7: "|", 0xB5: "u"}).encode("ascii", "replace").decode()

    def _note(self, rank: int) -> str:
        whole = self.timeline.value_ns
        idle = 1.0 - self.timeline.busy_ns(rank) / whole if whole else 0.0
        memory = memory_text(self.plan, rank)
        return self._safe(f" idle {percent(idle)}" + (f" · {memory}" if memory else ""))

    def _axis(self) -> Text:
        window, unit = self.window, self.plan.unit
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
            yield self._lane("  real", self._real(rank), self._real_note(rank))
            return
        if self.draws_messages:
            lane = message_lane(self.sent[rank], self.window, self.glyphs, colour=self.colour)
            yield self._lane("  send", lane)
        if self.draws_memory:
            yield self._lane("  mem", self._memory(rank))

    def _lane(self, name: str, lane: Text, note: str = "") -> Text:
        line = Text(no_wrap=True, overflow="crop")
        line.append(
            name.ljust(self.left)[: self.left], _DIM if self.colour and name[0] == " " else Style.null()
        )
        line.append_text(lane)
        if self.right and note:
            line.append(note, _DIM if self.colour else Style.null())
        return line

    def _bars(self, rank: int) -> Text:
        stages = self.timeline.problem.placement.stages_of(rank)
        boxes = [
            Box(a, self.timeline.start[rank][k], self.timeline.end[rank][k], stages.index(a.stage))
            for k, a in enumerate(self.timeline.schedule.order[rank])
            if a.kind.is_compute
        ]
        return bar_lane(boxes, self.window, self.glyphs, colour=self.colour)

    def _real(self, rank: int) -> Text:
        assert self.measured is not None
        stages = self.timeline.problem.placement.stages_of(rank)
        row = self.measured.ranks[rank] if rank < len(self.measured.ranks) else ()
        boxes = [
            Box(a, start, end, stages.index(a.stage) if a.stage in stages else 0)
            for a, start, end in sorted(row, key=lambda event: event[1])
            if a.kind.is_compute
        ]
        return bar_lane(boxes, self.window, self.glyphs, colour=self.colour)

    def _real_note(self, rank: int) -> str:
        assert self.measured is not None
        whole = self.measured.makespan_ns
        if not whole or rank >= len(self.measured.ranks):
            return ""
        return f" idle {percent(1.0 - self.measured.busy_ns(rank) / whole)}"

    def _messages(self) -> list[list[Message]]:
        """Per rank, the messages that it sends."""
        problem, times = self.timeline.problem, action_times(self.timeline)
        found: list[list[Message]] = [[] for _ in range(problem.num_ranks)]
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
            found[rank].append(Message(message.backward, start, end))
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

    def _measured_lines(self) -> Iterator[Text]:
        assert self.measured is not None
        unit, planned, real = self.plan.unit, self.timeline.makespan_ns, self.measured.makespan_ns
        over = real / planned - 1 if planned else 0.0
        yield Text()
        yield self._line(
            f"measured makespan {unit.text(real)}, planned {unit.text(planned)}: {100 * over:+.1f} %",
            _BOLD,
        )
        for kind, plan, got, count in kind_means(self.timeline, self.measured):
            share = f"{100 * (got / plan - 1):+.1f} %" if plan else "free in the plan"
            yield self._line(
                f"  {kind.letter:<2} {count:>5} x  mean {unit.text(got)}, planned {unit.text(plan)}: {share}"
            )


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _ready(message: Sent, times: Mapping[Action, tuple[int, int]]) -> int | None:
    """When the action that makes a message ends; None where the order lacks it."""
    kinds = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD) if message.backward else (Kind.FORWARD,)
    made_by = (Action(kind, message.source, message.microbatch) for kind in kinds)
    return next((times[a][1] for a in made_by if a in times), None)
