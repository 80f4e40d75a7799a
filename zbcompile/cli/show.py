"""``zbcompile show``: draws a schedule."""

from __future__ import annotations

import argparse
import re

from zbcompile.cli.console import bounded_width, draw, screen_lines
from zbcompile.cli.inputs import load_scheduled, parse_time, where_of
from zbcompile.cli.shared_options import MAX_COLUMNS, add_schedule_input, columns, output, words
from zbcompile.errors import UsageError
from zbcompile.formats import measured_json
from zbcompile.formats.detect import load_schedule
from zbcompile.formats.fields import format_json
from zbcompile.formats.files import Output, check_distinct, read_text
from zbcompile.formats.measured_json import Measured
from zbcompile.formats.streams import say, write_output
from zbcompile.show.export import export
from zbcompile.show.page import Shown, page
from zbcompile.show.summary import Summary, measured_to_json, remarks, summarize, to_json
from zbcompile.show.timeline import Picture, View, least_columns

__all__ = ["add_options", "run"]

_NUMBER = re.compile("[0-9]{1,7}")
_RANKS = re.compile("([0-9]{1,7})(?:-([0-9]{1,7}))?")
_EXPORT_COLUMNS = 120
_LEAST_COLUMNS = 80
_PICTURE_OPTIONS = ("from", "to", "ranks", "follow", "fold", "memory", "messages", "width")
_MAX_CELLS = 1 << 18
"""Most columns times ranks, where there are more than `_LEAST_COLUMNS`: about ten seconds in colour."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_schedule_input(parser)
    parser.add_argument("--json", action="store_true", help="the figures as JSON instead of a picture")
    parser.add_argument(
        "--measured", type=words, metavar="FILE", help="lay a measured timeline over the plan"
    )
    parser.add_argument(
        "--from", dest="first", type=words, metavar="T", help="start of the part to draw: 20ms, 1.5s or 30%%"
    )
    parser.add_argument("--to", dest="last", type=words, metavar="T", help="end of the part to draw")
    parser.add_argument(
        "--ranks", type=words, metavar="LIST", help="ranks to draw: 0-3,7 or all (those that fit the screen)"
    )
    parser.add_argument("--follow", type=words, metavar="MICROBATCH", help="let one microbatch stand out")
    parser.add_argument(
        "--fold",
        action=argparse.BooleanOptionalAction,
        help="draw one period of the steady state for all (where actions have no room otherwise)",
    )
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, help="memory lanes (where they fit)"
    )
    parser.add_argument(
        "--messages", action=argparse.BooleanOptionalAction, help="message lanes (where they fit)"
    )
    parser.add_argument("--width", type=columns, help="columns (the terminal's)")
    parser.add_argument("--svg", type=output, metavar="FILE", help="write the picture as SVG")
    parser.add_argument(
        "--html", type=output, metavar="FILE", help="write a page to zoom and follow, in one file"
    )
    parser.add_argument(
        "--against", type=words, metavar="SCHEDULE", help="a second schedule under the first, in the page"
    )


def run(arguments: argparse.Namespace) -> int:
    """Draw a schedule on the terminal, or print its figures, or write the picture to a file."""
    outputs = [place for place in (arguments.svg, arguments.html) if place is not None]
    on_screen = not arguments.json and not outputs
    if arguments.json or on_screen:
        outputs.append(Output.to("-"))
    check_distinct(outputs)
    _check_used(arguments, on_screen)
    file = load_scheduled(arguments)
    _check_width(arguments.width, file.schedule.num_ranks)
    summary = summarize(file)
    for remark in remarks(summary):
        say(f"note: {remark}; `zbcompile check` says where")
    measured = None if arguments.measured is None else _measured(arguments.measured, summary)
    if arguments.html is not None:
        arguments.html.write(page(_shown(arguments, summary, measured)))
    view = _view(arguments, summary, measured, screen_lines() if on_screen else None)
    picture = Picture(summary, view, measured)
    ranks = summary.timeline.schedule.num_ranks
    most = min(MAX_COLUMNS, max(_LEAST_COLUMNS, _MAX_CELLS // ranks))
    if arguments.svg is not None:
        arguments.svg.write(export(picture, bounded_width(arguments.width or _EXPORT_COLUMNS, most)))
    if arguments.json:
        figures = to_json(summary)
        if measured is not None:
            figures["measured"] = measured_to_json(summary, measured)
        write_output(format_json(figures))
    elif on_screen:
        draw(picture, arguments.width, most=most)
    return 0


def _check_used(arguments: argparse.Namespace, on_screen: bool) -> None:
    """Refuse options of pictures that no output would follow."""
    if arguments.against is not None and arguments.html is None:
        raise UsageError("--against lays a second schedule into a page", fix="name the page with --html FILE")
    if on_screen or arguments.svg is not None:
        return
    for option in _PICTURE_OPTIONS:
        if getattr(arguments, {"from": "first", "to": "last"}.get(option, option)) is not None:
            raise UsageError(
                f"--{option} is of pictures on the terminal and of --svg",
                fix="leave it out, or ask for the picture, too",
            )


def _check_width(width: int | None, num_ranks: int) -> None:
    """Refuse a width that no lane fits; a terminal that is as narrow gets broken lines."""
    least = least_columns(num_ranks)
    if width is not None and width < least:
        raise UsageError(
            "--width is too narrow for a picture",
            needed=f"at least {least} columns",
            given=width,
            fix="leave it out for the terminal's width",
        )


def _shown(arguments: argparse.Namespace, summary: Summary, measured: Measured | None) -> list[Shown]:
    """Return what the page shows, one above the other."""
    shown = [Shown("planned", summary)]
    if measured is not None:
        shown.append(Shown("measured", summary, measured))
    if arguments.against is not None:
        if "-" in (arguments.schedule, arguments.profile, arguments.measured) and arguments.against == "-":
            raise UsageError("standard input can be read only once", fix="give one of the files by name")
        file, notes = load_schedule(read_text(arguments.against), where_of(arguments.against))
        for note in notes:
            say("note:", note)
        shown[0] = Shown(where_of(arguments.schedule), summary)
        shown.append(Shown(where_of(arguments.against), summarize(file)))
    return shown


def _measured(path: str, summary: Summary) -> Measured:
    measured = measured_json.loads(read_text(path), path)
    ranks = summary.timeline.schedule.num_ranks
    if len(measured.ranks) != ranks:
        raise UsageError(
            "the measured timeline is of another plan", needed=f"{ranks} ranks", given=len(measured.ranks)
        )
    return measured


def _view(
    arguments: argparse.Namespace, summary: Summary, measured: Measured | None, lines: int | None
) -> View:
    whole = summary.timeline.makespan_ns
    window = None
    if arguments.first is not None or arguments.last is not None:
        first = 0 if arguments.first is None else parse_time(arguments.first, whole)
        last = whole if arguments.last is None else parse_time(arguments.last, whole)
        if not 0 <= first < last:
            raise UsageError("--from must lie before --to", given=f"{first} ns to {last} ns")
        end = max(whole, 0 if measured is None else measured.makespan_ns)
        if first >= end:
            raise UsageError(
                "--from lies behind the end of the step", needed=f"less than {end} ns", given=f"{first} ns"
            )
        window = (first, last)
    schedule = summary.timeline.schedule
    return View(
        window,
        arguments.memory,
        arguments.messages,
        None if arguments.ranks is None else parse_ranks(arguments.ranks, schedule.num_ranks),
        None if arguments.follow is None else parse_follow(arguments.follow, schedule.num_microbatches),
        arguments.fold,
        lines,
    )


def parse_ranks(text: str, ranks: int) -> tuple[int, ...]:
    """Read ranks such as ``0-3,7``, or ``all``, in increasing order.

    Raises
    ------
    UsageError
        The text is no list of ranks, or one of them is not there.
    """
    if text.strip() == "all":
        return tuple(range(ranks))
    found: set[int] = set()
    for word in text.split(","):
        match = _RANKS.fullmatch(word.strip())
        if match is None:
            raise UsageError(f"{word[:40]!r} is no rank and no range of ranks", fix="write 0-3,7 or all")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < ranks:
            raise UsageError(
                "--ranks names ranks that are not there", needed=f"0 to {ranks - 1}", given=word[:40]
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def parse_follow(text: str, microbatches: int) -> int:
    """Read the number of a microbatch.

    Raises
    ------
    UsageError
        It is no number, or there is no such microbatch.
    """
    if not _NUMBER.fullmatch(text.strip()) or int(text) >= microbatches:
        raise UsageError("--follow names no microbatch", needed=f"0 to {microbatches - 1}", given=text[:40])
    return int(text)
