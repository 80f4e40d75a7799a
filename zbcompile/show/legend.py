"""The legend of a picture: every sign and shade that is drawn, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text

from zbcompile.schedule.ir import Action, Kind
from zbcompile.show.once_lane import NAMES, style_of
from zbcompile.show.palette import Glyphs, fill_of, heat, ink, letter_of, paint

__all__ = ["Legend"]

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD_INPUT: "gradient of inputs",
    Kind.BACKWARD_WEIGHT: "gradient of weights",
    Kind.FULL_BACKWARD: "both, fused",
}
_DARK = "#101418"


@dataclass(frozen=True, slots=True)
class Legend:
    """What a picture draws.

    Attributes
    ----------
    kinds
        The compute kinds.
    stages
        Most stages of a rank.
    messages, path, coarse
        Whether there are lanes of messages, a critical path, columns with several actions.
    held
        What holds ranks; empty where nothing does.
    memory
        What a full memory level means; empty where there is no lane.
    capped, over
        Whether there are caps, and whether a rank exceeds its own.
    follow
        The microbatch that is followed.
    once
        Letters of what ranks do once a step (`zbcompile.show.once_lane`).
    """

    kinds: frozenset[Kind]
    stages: int
    messages: bool
    held: str
    path: bool
    coarse: bool
    memory: str
    capped: bool
    over: bool
    follow: int | None
    once: str = ""

    def items(self, glyphs: Glyphs, colour: bool) -> Iterator[Text]:
        """Yield the entries, each a sample and its meaning."""
        for kind, name in _NAMES.items():
            if kind in self.kinds:
                yield _item(_sample(kind, glyphs, colour), name)
        yield from self._shades(glyphs, colour)
        yield _item(Text(glyphs.gap * 3), "bubble")
        if self.held:
            ink_of_held = Style(color=paint(Action(Kind.SEND_F, 0, 0, 0))) if colour else Style.null()
            yield _item(Text(glyphs.held * 3, ink_of_held), f"held by {self.held}")
        if self.path:
            yield from self._path(glyphs, colour)
        if self.messages:
            for glyph, kind, name in (
                (glyphs.forward, Kind.SEND_F, "activation"),
                (glyphs.backward, Kind.SEND_B, "gradient"),
            ):
                sample = glyphs.wire + glyph if glyph == glyphs.forward else glyph + glyphs.wire
                yield _item(Text(sample, ink(kind) if colour else Style.null()), f"{name} sent")
        for letter, name in NAMES.items():
            if letter in self.once:
                drawn = Text(letter + glyphs.wire, style_of(letter) if colour else Style.null())
                yield _item(drawn, f"{name}, once a step")
        if self.memory:
            levels = "".join(glyphs.levels[k] for k in (2, 5, 7))
            yield _item(
                Text(levels, Style(color=heat(0.0)) if colour else ""), f"memory, full = {self.memory}"
            )
            if colour and self.capped:
                yield _item(Text(glyphs.levels[7], Style(color=heat(0.95))), "over 90 %")
            if self.over:
                yield _item(Text(glyphs.over, Style(color=heat(2.0)) if colour else ""), "over the cap")
        if self.coarse:
            yield Text("several actions a column: kinds in proportion")

    def _shades(self, glyphs: Glyphs, colour: bool) -> Iterator[Text]:
        """Yield what shades and small letters mean."""
        first = min(self.kinds, key=list(Kind).index, default=Kind.FORWARD)
        if self.follow is not None:
            dim = Text("   ", Style(bgcolor=paint(Action(first, 0, 0), dim=True)))
            yield _item(dim if colour else Text(glyphs.dimmed * 3), f"not microbatch {self.follow}")
        elif colour and not self.coarse:
            sample = Text(" ", Style(bgcolor=paint(Action(first, 0, 0))))
            sample.append(" ", Style(bgcolor=paint(Action(first, 0, 1))))
            yield _item(sample, "even, odd microbatch")
        if self.stages > 1:
            if colour:
                ramp = Text()
                for stage in range(self.stages):
                    ramp.append(" ", Style(bgcolor=paint(Action(first, 0, 0), stage, self.stages)))
                yield _item(ramp, "the rank's first to last stage")
            else:
                small = "".join(
                    letter_of(Action(kind, 0, 0), 1)
                    for kind in _NAMES
                    if kind in self.kinds and len(kind.letter) == 1
                )
                yield _item(Text(small), "the rank's later stages")

    def _path(self, glyphs: Glyphs, colour: bool) -> Iterator[Text]:
        if colour:
            first = min(self.kinds, key=list(Kind).index, default=Kind.FORWARD)
            yield _item(
                Text(2 * glyphs.foot, Style(color=_DARK, bgcolor=paint(Action(first, 0, 0)))), "critical"
            )
        yield _item(
            Text(f"0{glyphs.chain}{glyphs.down}{glyphs.up}"),
            "critical path: its rank, to higher, to lower ranks",
        )


def _sample(kind: Kind, glyphs: Glyphs, colour: bool) -> Text:
    if colour:
        return Text(f" {kind.letter} ", Style(color=_DARK, bgcolor=paint(Action(kind, 0, 0)), bold=True))
    return Text(kind.letter + 2 * fill_of(kind, glyphs))


def _item(sample: Text, name: str) -> Text:
    return Text.assemble(sample, f" {name}")
