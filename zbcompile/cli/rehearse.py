"""``zbcompile rehearse``: runs a schedule on real processes and channels, with sleeping compute.

torch is imported when the command runs.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.table import Table

from zbcompile.cli.console import draw
from zbcompile.cli.inputs import check_directory, load_scheduled
from zbcompile.cli.shared_options import add_schedule_input, output, positive
from zbcompile.errors import UsageError
from zbcompile.formats import measured_json, profile_json
from zbcompile.formats.fields import format_json
from zbcompile.formats.files import Output, check_distinct
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.formats.streams import write_output
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution
from zbcompile.show.units import format_bytes, time_unit

if TYPE_CHECKING:
    from zbcompile.runtime.rehearse import Rehearsal

__all__ = ["add_options", "run"]

_STALL_S = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = "On a cluster: torchrun --nproc-per-node N -m zbcompile rehearse SCHEDULE.json"
    add_schedule_input(parser)
    parser.add_argument("--steps", type=positive, default=3, help="steps to run; the fastest counts (3)")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.add_argument(
        "--measured", type=output, metavar="FILE", help="write the measured timeline, for show --measured"
    )
    parser.add_argument(
        "--calibrated",
        type=output,
        metavar="FILE",
        help="write the profile with measured links and host time",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run a schedule and compare its times with the planned ones.

    Under torchrun each process is a rank and rank 0 writes the result; otherwise the command starts the
    processes.
    """
    check_directory()
    outputs = [o for o in (arguments.measured, arguments.calibrated) if o is not None]
    check_distinct([Output.to("-"), *outputs])
    file = load_scheduled(arguments)
    if file.problem is None:
        raise UsageError("the schedule carries no profile to sleep by", fix="give --profile PROFILE.json")
    from zbcompile.compiler.rehearsal import rehearse

    solution = _solution(file, file.problem)
    timeout_s = 120 + 10 * arguments.steps * solution.certificate.value_ns / 1e9
    found = rehearse(solution, steps=arguments.steps, stall_limit_s=_STALL_S, timeout_s=timeout_s)
    if found is None:
        return 0
    if arguments.measured is not None:
        arguments.measured.write(measured_json.dumps(found.measured))
    if arguments.calibrated is not None:
        arguments.calibrated.write(profile_json.dumps(found.calibrated))
    if arguments.json:
        write_output(format_json(_figures(found)))
    else:
        _print(found)
    return 0


def _solution(file: ScheduleFile, problem: Problem) -> Solution:
    """Return the file's solution; an order without a certificate is rated."""
    from zbcompile.planner.imported import rated

    if file.certificate is not None:
        return file.solution()
    return rated(file.schedule, problem)


def _figures(found: Rehearsal) -> dict[str, object]:
    link = found.calibrated.link
    return {
        "planned_makespan_ns": found.planned_ns,
        "measured_makespan_ns": found.measured_ns,
        "calibrated_makespan_ns": found.calibrated_ns,
        "planned_span_ns": found.planned_span_ns,
        "measured_span_ns": found.measured_span_ns,
        "excess": found.excess,
        "excess_calibrated": found.excess_calibrated,
        "overhead_ns": found.calibrated.overhead_ns,
        "latency_ns": link.latency_ns,
        "bytes_per_second": link.bytes_per_second,
        "rows": [
            {
                "rank": row.rank,
                "kind": "update" if row.kind is None else row.kind.value,
                "count": row.count,
                "planned_ns": row.planned_ns,
                "measured_ns": row.measured_ns,
            }
            for row in found.rows
        ],
    }


def _print(found: Rehearsal) -> None:
    unit = time_unit(found.planned_ns)
    table = Table(title="planned against measured, whole step", title_justify="left")
    for name in ("rank", "kind", "count", f"planned {unit.name}", f"measured {unit.name}", "excess"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for row in found.rows:
        excess = f"{100 * (row.measured_ns / row.planned_ns - 1):+.1f} %" if row.planned_ns else ""
        table.add_row(
            str(row.rank),
            "update" if row.kind is None else row.kind.letter,
            str(row.count),
            unit.number(row.planned_ns),
            unit.number(row.measured_ns),
            excess,
        )
    draw(table)
    link = found.calibrated.link
    lines = (
        f"makespan {unit.text(found.measured_ns)} measured, {unit.text(found.planned_ns)} planned:"
        f" {100 * found.excess:+.2f} %",
        f"after calibration {unit.text(found.calibrated_ns)} planned: {100 * found.excess_calibrated:+.2f} %",
        f"calibrated: {found.calibrated.overhead_ns / 1000:.0f} µs host time per action, "
        f"{link.latency_ns / 1000:.0f} µs latency"
        + (f", {format_bytes(link.bytes_per_second)}/s" if link.bytes_per_second else ""),
    )
    write_output("\n".join(lines) + "\n")
