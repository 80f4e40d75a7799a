"""Colours and glyphs.

The colours can be told apart with any colour vision and on terminals with 256 colours. Source: the palette of
Okabe and Ito.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rich.style import Style

from zbcompile.schedule.ir import Action, Kind

__all__ = [
    "ASCII",
    "KIND_COLOURS",
    "UNICODE",
    "Glyphs",
    "fill_of",
    "heat",
    "ink",
    "letter_of",
    "paint",
]

KIND_COLOURS = {
    Kind.FORWARD: (("#4a9ede", "#2f7fc0"), ("#a5d0fa", "#8abcf0")),
    Kind.BACKWARD_INPUT: (("#f0a830", "#d48c14"), ("#fbdc9a", "#f2c976")),
    Kind.BACKWARD_WEIGHT: (("#2bb584", "#159668"), ("#74d89c", "#55c682")),
    Kind.FULL_BACKWARD: (("#d689b8", "#ba6a9c"), ("#f0bfe0", "#e2a3cf")),
}
"""Per kind: (even, odd microbatch) of a rank's first stage, and of its last."""
_DIMMED = ("#3a3f49", "#454b56")
"""Microbatches that are not followed."""
_HELD = "#7d6a9c"
_ACTIVATION, _GRADIENT = KIND_COLOURS[Kind.FORWARD][0][0], KIND_COLOURS[Kind.BACKWARD_INPUT][0][0]
"""Messages have the colour of what they bring."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters that a terminal can show.

    Attributes
    ----------
    fills
        What stretches the labels of F, B, W and BW without colour. That of BW also stands for it where its
        two letters have no room.
    gap
        Idle time.
    held
        Time that a send holds its rank.
    dimmed
        Actions of microbatches that are not followed, without colour.
    levels
        Memory levels from low to high.
    over
        A memory level above the cap.
    forward, backward, both
        Arrival of an activation, of a gradient, and of both in one column.
    wire
        A message on its way.
    chain, down, up
        The critical path: on a rank, on its way to a higher rank, to a lower rank.
    tick, wall
        A mark on the time axis; where a part of the step ends.
    foot
        In colour, the line along the foot of an action on the critical path.
    blocks
        A cell filled from the left, by eighths; empty where the terminal has no such characters.
    """

    fills: tuple[str, str, str, str]
    gap: str
    held: str
    dimmed: str
    levels: str
    over: str
    forward: str
    backward: str
    both: str
    wire: str
    chain: str
    down: str
    up: str
    tick: str
    wall: str
    foot: str
    blocks: str


UNICODE = Glyphs(
    fills=("─", "═", "~", "≡"),
    gap="·",
    held="▒",
    dimmed="░",
    levels="▁▂▃▄▅▆▇█",
    over="▲",
    forward="→",
    backward="←",
    both="↔",
    wire="╌",
    chain="━",
    down="╲",
    up="╱",
    tick="╷",
    wall="┊",
    foot="▁",
    blocks=" ▏▎▍▌▋▊▉█",
)
ASCII = Glyphs(
    fills=("-", "=", "~", "#"),
    gap=".",
    held="%",
    dimmed=":",
    levels="12345678",
    over="!",
    forward=">",
    backward="<",
    both="x",
    wire="-",
    chain="-",
    down="\\",
    up="/",
    tick="|",
    wall="|",
    foot="_",
    blocks="",
)


def paint(action: Action, local_stage: int = 0, stages: int = 1, *, dim: bool = False) -> str:
    """Return the colour of an action.

    The kind gives the hue, the microbatch the shade; the later stages of a rank are lighter. A send has the
    colour of the time that it holds its rank.

    Parameters
    ----------
    local_stage, stages
        Index of the action's stage among the stages of its rank, and how many these are.
    dim
        The microbatch is not the one that is followed.
    """
    if not action.kind.is_compute:
        return _HELD
    shade = action.microbatch % 2
    if dim:
        return _DIMMED[shade]
    first, last = (pair[shade] for pair in KIND_COLOURS[action.kind])
    return _between(first, last, local_stage, max(1, stages - 1))


@cache
def _between(first: str, last: str, part: int, whole: int) -> str:
    """Return a colour that lies ``part / whole`` of the way between two."""
    channels = ((int(first[k : k + 2], 16), int(last[k : k + 2], 16)) for k in (1, 3, 5))
    return "#" + "".join(f"{a + (b - a) * min(part, whole) // whole:02x}" for a, b in channels)


def letter_of(action: Action, local_stage: int = 0) -> str:
    """Return the letter of a kind without colour: small for the later stages of a rank."""
    return action.kind.letter.lower() if local_stage else action.kind.letter


def ink(kind: Kind) -> Style:
    """Return the style of text and lines of a kind."""
    if kind.is_compute:
        return Style(color=KIND_COLOURS[kind][0][0])
    return Style(color=_ACTIVATION if kind in (Kind.SEND_F, Kind.RECV_F) else _GRADIENT)


def fill_of(kind: Kind, glyphs: Glyphs) -> str:
    """Return the character that stretches the label of a compute kind without colour."""
    return glyphs.fills[list(Kind).index(kind)]


def heat(share: float) -> str:
    """Return the colour of a memory level by its share of the cap."""
    if share > 1.0:
        return "#e0303a"
    return "#d9774f" if share > 0.9 else "#8a93a6"
