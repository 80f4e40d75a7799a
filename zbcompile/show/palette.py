"""Colours and glyphs. Colours are told apart with any colour vision (Okabe and Ito) and in 256 colours."""

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
_LINES = {"F": "#4a9ede", "B": "#f0a830"}


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters for a terminal without colour; ``fills`` are for F, B, W, BW."""

    fills: tuple[str, str, str, str]
    gap: str
    levels: str
    forward: str
    backward: str
    both: str
    wire: str


UNICODE = Glyphs(("─", "═", "~", "≡"), "·", "▁▂▃▄▅▆▇█", "→", "←", "↔", "╌")
ASCII = Glyphs(("-", "=", "~", "#"), ".", "12345678", ">", "<", "x", "-")


def paint(action: Action, turn: int) -> str:
    """Colour of a compute action: hue by kind, shade by microbatch, lighter from a rank's second stage on."""
    return _PAINT[action.kind][min(turn, 1)][action.microbatch % 2]


def ink(kind: Kind) -> Style:
    """Text and lines of a kind."""
    letter = "F" if kind in (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F) else "B"
    return Style(color=_PAINT[kind][0][0] if kind.is_compute else _LINES[letter])


def fill_of(kind: Kind, glyphs: Glyphs) -> str:
    """The character that stretches a kind's label without colour."""
    return glyphs.fills[list(Kind).index(kind)]


def heat(share: float) -> str:
    """Colour of a memory level by its share of the cap."""
    if share > 1.0:
        return "#e0303a"
    return "#d9774f" if share > 0.9 else "#8a93a6"
