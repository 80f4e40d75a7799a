"""Draws what rich renders on the standard streams, at a width that is bounded."""

from __future__ import annotations

import os
import sys

from rich.console import Console, ConsoleDimensions, RenderableType

from zbcompile.cli.shared_options import MAX_COLUMNS
from zbcompile.formats.streams import check_output, say, talk, write_output

__all__ = ["bounded_width", "draw", "screen_lines"]

_LINES = 25
"""Height of the console; rich draws nothing of ours to it."""


def screen_lines() -> int | None:
    """Return how many lines the terminal on standard output shows above its prompt; None without one."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return Console(file=sys.stdout, _environ=_environment()).height - 1


def draw(
    renderable: RenderableType,
    width: int | None = None,
    *,
    least: int = 1,
    most: int = MAX_COLUMNS,
    on_error: bool = False,
) -> None:
    """Print on standard output, in colour where that is a terminal that has colours.

    Parameters
    ----------
    width
        Columns; the terminal's if left out.
    least
        Columns to use at least where the stream is no terminal and no width is given.
    most
        Columns to use at most; where that is fewer than wanted, a note says so.
    on_error
        Print on standard error instead.

    Raises
    ------
    UsageError
        Standard output is closed, full or broken.
    """
    file = sys.stderr if on_error else sys.stdout
    if file is None and on_error:
        return
    check_output()
    console = Console(file=file, highlight=False, _environ=_environment())
    if width is None:
        width = console.width if console.is_terminal else max(console.width, least)
    console.size = ConsoleDimensions(bounded_width(width, most), _LINES)
    with console.capture() as capture:
        console.print(renderable)
    (talk if on_error else write_output)(capture.get())


def bounded_width(width: int, most: int) -> int:
    """Return a width that is at most ``most`` columns, with a note where that is less."""
    if width > most:
        say(f"note: drawn {most} columns wide, not {width}")
    return min(width, most)


def _environment() -> dict[str, str]:
    """Return the environment without a COLUMNS or LINES that is no number."""
    kept = dict(os.environ)
    for name in ("COLUMNS", "LINES"):
        value = kept.get(name, "")
        if not (value.isascii() and value.isdigit() and len(value) <= 18 and int(value) > 0):
            kept.pop(name, None)
    return kept
