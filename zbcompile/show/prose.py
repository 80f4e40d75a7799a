"""Paragraphs for a terminal: wrapped at its width, with an indent, and no blanks at the ends of lines."""

from __future__ import annotations

import textwrap

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

__all__ = ["Prose"]


class Prose:
    """A text whose lines are wrapped at the width of what it is drawn on.

    Parameters
    ----------
    text
        Lines of words; each is wrapped for itself.
    indent
        Columns before every line.
    style
        A style of rich.
    """

    def __init__(self, text: str, indent: int = 0, style: str = "") -> None:
        self.text, self.indent, self.style = text, indent, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the wrapped lines."""
        blank, width = " " * self.indent, max(options.max_width, self.indent + 20)
        for line in self.text.split("\n"):
            wrapped = textwrap.fill(
                line,
                width,
                initial_indent=blank,
                subsequent_indent=blank,
                break_long_words=False,
                break_on_hyphens=False,
            )
            yield Text(wrapped, self.style, no_wrap=True)
