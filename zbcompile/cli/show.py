"""``zbcompile show``."""

from __future__ import annotations

import argparse

from rich.console import Console

from zbcompile.cli.inputs import load_scheduled, parse_time, say
from zbcompile.errors import UsageError
from zbcompile.formats import measured_json
from zbcompile.formats.fields import format_json
from zbcompile.formats.files import read_text, write_text
from zbcompile.formats.measured_json import Measured
from zbcompile.show.export import export
from zbcompile.show.summary import Plan, measured_to_json, plan_of, remarks, to_json
from zbcompile.show.timeline import Picture, View

__all__ = ["show"]

_EXPORT_COLUMNS = 120


def show(arguments: argparse.Namespace) -> int:
    """Draw a schedule on the terminal, or give its figures, or write the picture to a file."""
    plan = plan_of(load_scheduled(arguments))
    for remark in remarks(plan):
        say(f"note: {remark}; `zbcompile check` says where")
    measured = None if arguments.measured is None else _measured(arguments.measured, plan)
    if arguments.json:
        figures = to_json(plan)
        if measured is not None:
            figures["measured"] = measured_to_json(plan, measured)
        write_text("-", format_json(figures))
        return 0
    picture = Picture(plan, _view(arguments, plan), measured)
    for path, kind in ((arguments.svg, "svg"), (arguments.html, "html")):
        if path is not None:
            write_text(path, export(picture, kind, arguments.width or _EXPORT_COLUMNS))
    if arguments.svg is None and arguments.html is None:
        Console(width=arguments.width, highlight=False).print(picture)
    return 0


def _measured(path: str, plan: Plan) -> Measured:
    measured = measured_json.loads(read_text(path), path)
    ranks = plan.timeline.schedule.num_ranks
    if len(measured.ranks) != ranks:
        raise UsageError(
            "the measured timeline is of another plan", needed=f"{ranks} ranks", given=len(measured.ranks)
        )
    return measured


def _view(arguments: argparse.Namespace, plan: Plan) -> View:
    whole = plan.timeline.makespan_ns
    window = None
    if arguments.first is not None or arguments.last is not None:
        first = parse_time(arguments.first, whole) if arguments.first else 0
        last = parse_time(arguments.last, whole) if arguments.last else whole
        if not 0 <= first < last:
            raise UsageError("--from must lie before --to", given=f"{first} ns to {last} ns")
        window = (first, last)
    return View(window, arguments.memory, arguments.messages)
