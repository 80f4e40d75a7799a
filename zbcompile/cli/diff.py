"""``zbcompile diff``: where two schedules differ, and what that comes to."""

from __future__ import annotations

import argparse

from zbcompile.cli.console import draw
from zbcompile.cli.inputs import where_of
from zbcompile.cli.shared_options import words
from zbcompile.errors import CheckError, UsageError
from zbcompile.formats.detect import load_schedule
from zbcompile.formats.fields import format_json
from zbcompile.formats.files import read_text
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.formats.streams import check_output, say, write_output
from zbcompile.show.difference import differences
from zbcompile.show.difference_words import difference_json, difference_text

__all__ = ["add_options", "run"]

_LEAST_COLUMNS = 80


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("first", type=words, help="a schedule as for `show`; - for standard input")
    parser.add_argument("second", type=words, help="the schedule to hold against it")
    parser.add_argument("--json", action="store_true", help="the differences as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Compare two schedules; return 0 for the same order of the same problem, 1 where they differ.

    Raises
    ------
    UsageError
        A file is broken, or its order cannot run: nothing was compared, and the code is 2, as of `diff`.
    """
    check_output()
    if arguments.first == arguments.second == "-":
        raise UsageError("standard input can be read only once", fix="give one of the files by name")
    files = _loaded(arguments.first), _loaded(arguments.second)
    try:
        found = differences(*files)
    except CheckError as error:
        raise UsageError(
            f"one of the orders cannot run: {error}", fix="`zbcompile check` says which"
        ) from None
    if arguments.json:
        write_output(format_json(difference_json(found)))
    else:
        draw(difference_text(found), least=_LEAST_COLUMNS)
    return 0 if found.same else 1


def _loaded(path: str) -> ScheduleFile:
    file, remarks = load_schedule(read_text(path), where_of(path))
    for remark in remarks:
        say("note:", remark)
    return file
