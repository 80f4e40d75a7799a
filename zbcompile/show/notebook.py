"""What notebooks show of a schedule, a solution and a pipeline: the picture, as HTML or as text."""

from __future__ import annotations

import html
import io

from rich.console import Console

from zbcompile.errors import ZBCompileError
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.notebook import Pictured
from zbcompile.schedule.solution import Solution
from zbcompile.show.export import fragment
from zbcompile.show.summary import summarize
from zbcompile.show.timeline import Picture, View

__all__ = ["notebook_html", "notebook_text"]

_COLUMNS = 120
_LINES = 48
"""Lines of a picture in a notebook: ranks that do not fit are left out."""


def notebook_html(shown: Pictured) -> str:
    """Return the picture of an order as HTML; a schedule alone is timed with F = B = W = 1.

    An order that cannot be timed is shown as its text, with the reason.
    """
    try:
        return fragment(_picture(shown), _COLUMNS)
    except ZBCompileError as error:
        return f"<pre>{html.escape(_refused(shown, error))}</pre>"


def notebook_text(shown: Pictured) -> str:
    """Return the picture of an order as text without colour; as for `notebook_html`."""
    try:
        console = Console(
            file=io.StringIO(), width=_COLUMNS, color_system=None, legacy_windows=False, _environ={}
        )
        with console.capture() as capture:
            console.print(_picture(shown))
        return capture.get().rstrip("\n")
    except ZBCompileError as error:
        return _refused(shown, error)


def _picture(shown: Pictured) -> Picture:
    return Picture(summarize(_file(shown)), View(lines=_LINES))


def _file(shown: Pictured) -> ScheduleFile:
    if isinstance(shown, Solution):
        return ScheduleFile.of(shown)
    if isinstance(shown, Schedule):
        return ScheduleFile(shown)
    raise TypeError(f"no picture of {type(shown).__name__}")


def _refused(shown: Pictured, error: ZBCompileError) -> str:
    return "\n\n".join(("no picture: " + str(error), str(_file(shown).schedule)))
