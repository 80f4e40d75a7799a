"""``zbcompile convert`` and ``zbcompile schema``."""

from __future__ import annotations

import argparse
from dataclasses import replace

from zbcompile.cli.inputs import load_scheduled
from zbcompile.formats import chrome_trace, measured_json, schedule_json, torch_csv
from zbcompile.formats.fields import Fields, parse_json
from zbcompile.formats.files import read_text, write_text
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.formats.schemas import SCHEMAS, schema_text
from zbcompile.schedule.check import check
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.simulate import simulate
from zbcompile.show.summary import unit_problem

__all__ = ["convert", "schema"]


def convert(arguments: argparse.Namespace) -> int:
    """Write a schedule in another form. What is written has passed the judge."""
    if arguments.to == "chrome" and arguments.schedule != "-":
        text = read_text(arguments.schedule)
        if _is_measured(text, arguments.schedule):
            write_text(
                arguments.output, chrome_trace.dumps_measured(measured_json.loads(text, arguments.schedule))
            )
            return 0
    file = load_scheduled(arguments)
    problem = file.problem or unit_problem(file.schedule)
    if arguments.communication is not None or arguments.to == "csv-compute":
        schedule = file.schedule.compute_only()
        if arguments.communication:
            check(schedule, problem)
            schedule = insert_communication(schedule, problem)
        file = replace(file, schedule=schedule)
    check(file.schedule, problem)
    write_text(arguments.output, _written(file, arguments.to))
    return 0


def _is_measured(text: str, where: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    return Fields(parse_json(text, where), where).optional("format") == measured_json.NAME


def _written(file: ScheduleFile, form: str) -> str:
    if form == "schedule":
        return schedule_json.dumps(file)
    if form == "text":
        return str(file.schedule)
    if form == "chrome":
        return chrome_trace.dumps(simulate(file.schedule, file.problem or unit_problem(file.schedule)))
    return torch_csv.dumps(file.schedule, communication=form == "csv")


def schema(arguments: argparse.Namespace) -> int:
    """Print a JSON Schema, or the names of all."""
    write_text("-", "\n".join(SCHEMAS) + "\n" if arguments.name is None else schema_text(arguments.name))
    return 0
