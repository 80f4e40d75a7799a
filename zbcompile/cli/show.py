"""``zbcompile show``: draws a schedule."""

from __future__ import annotations

import argparse

from zbcompile.cli.console import bounded_width, draw
from zbcompile.cli.inputs import load_scheduled, parse_time
from zbcompile.cli.shared_options import MAX_COLUMNS, add_schedule_input, columns, output, words
from zbcompile.errors import UsageError
from zbcompile.formats import measured_json
from zbcompile.formats.fields import format_json
from zbcompile.formats.files import Output, check_distinct, read_text
from zbcompile.formats.measured_json import Measured
from zbcompile.formats.streams import say, write_output
from zbcompile.show.export import ExportFormat, export
from zbcompile.show.summary import Summary, measured_to_json, remarks, summarize, to_json
from zbcompile.show.timeline import Picture, View

__all__ = ["add_options", "run"]

_EXPORT_COLUMNS = 120
_LEAST_COLUMNS = 80
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
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, help="memory lanes (to 16 ranks)")
    parser.add_argument(
        "--messages", action=argparse.BooleanOptionalAction, help="message lanes (to 16 ranks)"
    )
    parser.add_argument("--width", type=columns, help="columns (the terminal's)")
    parser.add_argument("--svg", type=output, metavar="FILE", help="write the picture as SVG")
    parser.add_argument("--html", type=output, metavar="FILE", help="write the picture as HTML")


def run(arguments: argparse.Namespace) -> int:
    """Draw a schedule on the terminal, or print its figures, or write the picture to a file."""
    exports: tuple[tuple[Output | None, ExportFormat], ...] = (
        (arguments.svg, "svg"),
        (arguments.html, "html"),
    )
    outputs = [place for place, _ in exports if place is not None]
    if arguments.json or not outputs:
        outputs.append(Output.to("-"))
    check_distinct(outputs)
    summary = summarize(load_scheduled(arguments))
    for remark in remarks(summary):
        say(f"note: {remark}; `zbcompile check` says where")
    measured = None if arguments.measured is None else _measured(arguments.measured, summary)
    picture = Picture(summary, _view(arguments, summary), measured)
    ranks = summary.timeline.schedule.num_ranks
    most = min(MAX_COLUMNS, max(_LEAST_COLUMNS, _MAX_CELLS // ranks))
    for place, form in exports:
        if place is not None:
            width = bounded_width(arguments.width or _EXPORT_COLUMNS, most)
            place.write(export(picture, form, width))
    if arguments.json:
        figures = to_json(summary)
        if measured is not None:
            figures["measured"] = measured_to_json(summary, measured)
        write_output(format_json(figures))
    elif not any(place for place, _ in exports):
        draw(picture, arguments.width, most=most)
    return 0


def _measured(path: str, summary: Summary) -> Measured:
    measured = measured_json.loads(read_text(path), path)
    ranks = summary.timeline.schedule.num_ranks
    if len(measured.ranks) != ranks:
        raise UsageError(
            "the measured timeline is of another plan", needed=f"{ranks} ranks", given=len(measured.ranks)
        )
    return measured


def _view(arguments: argparse.Namespace, summary: Summary) -> View:
    whole = summary.timeline.makespan_ns
    window = None
    if arguments.first is not None or arguments.last is not None:
        first = 0 if arguments.first is None else parse_time(arguments.first, whole)
        last = whole if arguments.last is None else parse_time(arguments.last, whole)
        if not 0 <= first < last:
            raise UsageError("--from must lie before --to", given=f"{first} ns to {last} ns")
        window = (first, last)
    return View(window, arguments.memory, arguments.messages)
