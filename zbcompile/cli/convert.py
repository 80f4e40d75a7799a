"""``zbcompile convert``: writes a schedule in another form."""

from __future__ import annotations

import argparse
import enum
from dataclasses import replace

from zbcompile.cli.inputs import load_scheduled, where_of
from zbcompile.cli.shared_options import add_output, add_schedule_input
from zbcompile.compiler.lower import lower_order
from zbcompile.errors import CheckError, UsageError
from zbcompile.formats import chrome_trace, measured_json, megatron_layout, schedule_json, torch_csv
from zbcompile.formats.fields import parse_json
from zbcompile.formats.files import read_text
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.formats.streams import say
from zbcompile.schedule.check import check
from zbcompile.schedule.ir import Schedule
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
    MEGATRON_LAYOUT = "megatron-layout"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = (
        "schedule: JSON. csv: torch's compute_comms. csv-compute: torch's compute_only. text: the IR's text. "
        "chrome: a trace for Perfetto (also from a measured timeline). megatron-layout: the string for "
        "--pipeline-model-parallel-layout, of a plan whose stages were cut out of pieces (plan --stages)."
    )
    add_schedule_input(parser)
    parser.add_argument("--to", required=True, choices=tuple(form.value for form in Form), help="the form")
    parser.add_argument(
        "--communication",
        action=argparse.BooleanOptionalAction,
        help="put sends and receives in, or leave them out (as they are)",
    )
    add_output(parser, "it (standard output)")


def run(arguments: argparse.Namespace) -> int:
    """Write a schedule in another form, after the judge has passed it."""
    form = Form(arguments.to)
    text, where = read_text(arguments.schedule), where_of(arguments.schedule)
    if form is Form.CHROME and _is_measured(text, where):
        for option in ("profile", "cap", "transport", "accumulate", "kept_gradients", "communication"):
            if getattr(arguments, option) is not None:
                name = option.replace("_", "-")
                raise UsageError(f"a measured timeline takes no --{name}", where=where)
        arguments.output.write(chrome_trace.dumps_measured(measured_json.loads(text, where)))
        return 0
    file = load_scheduled(arguments, text)
    problem = file.problem or unit_problem(file.schedule)
    schedule = file.schedule
    if arguments.communication is not None or form is Form.CSV_COMPUTE:
        schedule = schedule.compute_only()
        if arguments.communication:
            check(schedule, problem)
            schedule = lower_order(schedule, problem).schedule
    check(schedule, problem)
    if form is Form.SCHEDULE:
        file = _certified(file, schedule)
    arguments.output.write(_written(replace(file, schedule=schedule), form))
    return 0


def _certified(file: ScheduleFile, schedule: Schedule) -> ScheduleFile:
    """Return the file with what its certificate is worth for the order to write.

    The bound holds for every order of the problem, so the certificate takes the value of the order with other
    sends and receives. A certificate that speaks of another value than the file's own order has is dropped.
    """
    certificate, problem = file.certificate, file.problem
    if certificate is None or problem is None:
        return file
    try:
        own = simulate(file.schedule, problem).value_ns
    except CheckError:
        own = -1
    value = own if schedule == file.schedule else simulate(schedule, problem).value_ns
    if own != certificate.value_ns or value < certificate.bound_ns:
        say("note: the certificate is of another order: left out")
        return replace(file, certificate=None)
    return replace(file, certificate=replace(certificate, value_ns=value))


def _is_measured(text: str, where: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    document = parse_json(text, where)
    return isinstance(document, dict) and document.get("format") == measured_json.FILE.name


def _layout(file: ScheduleFile) -> str:
    if file.cuts is None:
        raise UsageError(
            "the plan does not say which layers its stages hold",
            fix="plan cuts: `zbcompile profile --pieces N`, then `zbcompile plan --stages N`",
        )
    return megatron_layout.of_cuts(file.cuts, file.schedule.placement) + "\n"


def _written(file: ScheduleFile, form: Form) -> str:
    if form is Form.SCHEDULE:
        return schedule_json.dumps(file)
    if form is Form.TEXT:
        return str(file.schedule)
    if form is Form.MEGATRON_LAYOUT:
        return _layout(file)
    if form is Form.CHROME:
        return chrome_trace.dumps(simulate(file.schedule, file.problem or unit_problem(file.schedule)))
    return torch_csv.dumps(file.schedule, communication=form is Form.CSV)
