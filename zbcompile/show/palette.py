"""Colours and glyphs.

The colours can be told apart with any colour vision and on terminals with 256 colours. Source: the palette of
Okabe and Ito.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.style import Style

from zbcompile.schedule.ir import Action, Kind

__all__ = ["ASCII", "BLOCKS", "UNICODE", "Glyphs", "fill_of", "heat", "ink", "paint"]

BLOCKS = " ▏▎▍▌▋▊▉█"
"""A cell filled from the left, by eighths."""

_PAINT = {
    Kind.FORWARD: (("#4a9ede", "#2f7fc0"), ("#8cc5f2", "#6db0e6")),
    Kind.BACKWARD_INPUT: (("#f0a830", "#d48c14"), ("#f8cd84", "#efba5e")),
    Kind.BACKWARD_WEIGHT: (("#2bb584", "#159668"), ("#84d8b8", "#5cc7a0")),
    Kind.FULL_BACKWARD: (("#d689b8", "#ba6a9c"), ("#ebbcd8", "#dea0c6")),
}
_ACTIVATION, _GRADIENT = _PAINT[Kind.FORWARD][0][0], _PAINT[Kind.BACKWARD_INPUT][0][0]
"""Messages have the colour of what they bring."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters that a terminal can show.

    Attributes
    ----------
    fills
        What stretches the labels of F, B, W and BW without colour.
    gap
        Idle time.
    levels
        Memory levels from low to high.
    forward, backward, both
        Arrival of an activation, of a gradient, and of both in one column.
    wire
        A message on its way.
    """

    fills: tuple[str, str, str, str]
    gap: str
    levels: str
    forward: str
    backward: str
    both: str
    wire: str


UNICODE = Glyphs(("─", "═", "~", "≡"), "·", "▁▂▃▄▅▆▇█", "→", "←", "↔", "╌")
ASCII = Glyphs(("-", "=", "~", "#"), ".", "12345678", ">", "<", "x", "-")


def paint(action: Action, local_stage: int) -> str:
    """Return the colour of a compute action.

    The kind gives the hue, the microbatch the shade; stages of a rank after its first are lighter.

    Parameters
    ----------
    local_stage
        Index of the action's stage among the stages of its rank.
    """
    return _PAINT[action.kind][min(local_stage, 1)][action.microbatch % 2]


def ink(kind: Kind) -> Style:
    """Return the style of text and lines of a kind."""
    if kind.is_compute:
        return Style(color=_PAINT[kind][0][0])
    return Style(color=_ACTIVATION if kind in (Kind.SEND_F, Kind.RECV_F) else _GRADIENT)


def fill_of(kind: Kind, glyphs: Glyphs) -> str:
    """Return the character that stretches the label of a compute kind without colour."""
    return glyphs.fills[list(Kind).index(kind)]


def heat(share: float) -> str:
    """Return the colour of a memory level by its share of the cap."""
    if share > 1.0:
        return "#e0303a"
    return "#d9774f" if share > 0.9 else "#8a93a6"
