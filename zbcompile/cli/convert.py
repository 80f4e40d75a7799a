"""``zbcompile convert``: writes a schedule in another form."""

from __future__ import annotations

import argparse
import enum
from dataclasses import replace

from zbcompile.cli.inputs import load_scheduled
from zbcompile.cli.shared_options import add_schedule_input
from zbcompile.compiler.lower import lower_order
from zbcompile.formats import chrome_trace, measured_json, schedule_json, torch_csv
from zbcompile.formats.fields import Fields, parse_json
from zbcompile.formats.files import read_text, write_text
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.schedule.check import check
from zbcompile.schedule.simulate import simulate
from zbcompile.show.summary import unit_problem

__all__ = ["Form", "add_options", "run"]


class Form(enum.Enum):
    """A form to write. The values are what the user types."""

    SCHEDULE = "schedule"
    CSV = "csv"
    CSV_COMPUTE = "csv-compute"
    TEXT = "text"
    CHROME = "chrome"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = (
        "schedule: JSON. csv: torch's compute_comms. csv-compute: torch's compute_only. text: the IR's text. "
        "chrome: a trace for Perfetto (also from a measured timeline)."
    )
    add_schedule_input(parser)
    parser.add_argument("--to", required=True, choices=tuple(form.value for form in Form), help="the form")
    parser.add_argument(
        "--communication",
        action=argparse.BooleanOptionalAction,
        help="put sends and receives in, or leave them out (as they are)",
    )
    parser.add_argument("-o", "--output", default="-", help="where to write (standard output)")


def run(arguments: argparse.Namespace) -> int:
    """Write a schedule in another form, after the judge has passed it."""
    form = Form(arguments.to)
    if form is Form.CHROME and arguments.schedule != "-":
        text = read_text(arguments.schedule)
        if _is_measured(text, arguments.schedule):
            measured = measured_json.loads(text, arguments.schedule)
            write_text(arguments.output, chrome_trace.dumps_measured(measured))
            return 0
    file = load_scheduled(arguments)
    problem = file.problem or unit_problem(file.schedule)
    if arguments.communication is not None or form is Form.CSV_COMPUTE:
        schedule = file.schedule.compute_only()
        if arguments.communication:
            check(schedule, problem)
            schedule = lower_order(schedule, problem).schedule
        file = replace(file, schedule=schedule)
    check(file.schedule, problem)
    write_text(arguments.output, _written(file, form))
    return 0


def _is_measured(text: str, where: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    return Fields(parse_json(text, where), where).optional("format") == measured_json.NAME


def _written(file: ScheduleFile, form: Form) -> str:
    if form is Form.SCHEDULE:
        return schedule_json.dumps(file)
    if form is Form.TEXT:
        return str(file.schedule)
    if form is Form.CHROME:
        return chrome_trace.dumps(simulate(file.schedule, file.problem or unit_problem(file.schedule)))
    return torch_csv.dumps(file.schedule, communication=form is Form.CSV)
