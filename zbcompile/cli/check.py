"""``zbcompile check``: judges a schedule and, if asked, proves its certificate again."""

from __future__ import annotations

import argparse

from zbcompile.cli.inputs import load_scheduled, where_of
from zbcompile.cli.shared_options import add_schedule_input
from zbcompile.errors import CheckError, UsageError
from zbcompile.formats.fields import format_json
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.formats.streams import check_output, say, write_output
from zbcompile.schedule.check import judge
from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.held_gradients import gradients_words
from zbcompile.schedule.limits import check_plannable
from zbcompile.schedule.simulate import timeline_of
from zbcompile.schedule.solution import Solution
from zbcompile.show.summary import unit_problem

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_schedule_input(parser)
    parser.add_argument("--certificate", action="store_true", help="prove the certificate's bound again")
    parser.add_argument("--json", action="store_true", help="the verdict as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Judge a schedule; return 0 when it is sound and 1 when it is not."""
    check_output()
    file = load_scheduled(arguments)
    problem = file.problem or unit_problem(file.schedule)
    found, graph = judge(file.schedule, problem)
    if arguments.certificate and (file.certificate is None or file.problem is None):
        raise UsageError("the schedule carries no certificate to prove", fix="leave --certificate out")
    if arguments.certificate and file.problem is not None:
        check_plannable(file.problem, where_of(arguments.schedule))
    proof: list[str] = []
    if graph is not None:
        found += _claims(file, graph)
    if not found and arguments.certificate:
        found, proof = _proved(file.solution())
    if arguments.json:
        write_output(format_json(_verdict(file, found)))
        return 1 if found else 0
    for fault in found:
        say(f"fault: {fault}")
    if found:
        say(f"{len(found)} fault{'s' if len(found) > 1 else ''} found")
        return 1
    count = sum(len(row) for row in file.schedule.order)
    words = ["complete", "in order", "free of deadlock"]
    if file.problem is not None and any(cap is not None for cap in problem.caps):
        words.append("under the cap")
    if file.certificate is not None:
        words.append("certificate proved again" if arguments.certificate else "value as certified")
    lines = [f"ok: {count} actions on {file.schedule.num_ranks} ranks: {', '.join(words)}"]
    if gradients := gradients_words(file.schedule, problem):
        lines.append(gradients)
    lines += proof
    write_output("\n".join(lines) + "\n")
    return 0


def _claims(file: ScheduleFile, graph: EventGraph) -> list[CheckError]:
    """Return a fault when the certificate states another value than the order has."""
    if file.certificate is None or file.problem is None:
        return []
    value = timeline_of(graph).value_ns
    if value == file.certificate.value_ns:
        return []
    return [
        CheckError(
            "the certificate speaks of another value",
            needed=f"{value} ns, as simulated",
            given=f"{file.certificate.value_ns} ns",
            fix="plan again",
        )
    ]


def _proved(solution: Solution) -> tuple[list[CheckError], list[str]]:
    """Derive the bound again and return the faults, or the derivation line by line."""
    from zbcompile.planner.certify.certificate import verify_certificate

    try:
        found = verify_certificate(solution)
    except CheckError as error:
        return [error], []
    if not found.proved:
        fault = CheckError(
            f"the {found.method} bound was not proved again in the time given",
            needed=f"{found.bound_ns} ns",
            given=f"{found.derived_ns} ns without the solver",
        )
        return [fault], []
    certificate = solution.certificate
    claim = f"no order has a {certificate.objective} below {found.bound_ns:,} ns"
    head = f"{claim} ({found.method}); {certificate.status}:"
    return [], [head, *found.lines, f"{'=':>8} {found.derived_ns:,} ns"]


def _verdict(file: ScheduleFile, found: list[CheckError]) -> dict[str, object]:
    return {
        "ok": not found,
        "ranks": file.schedule.num_ranks,
        "stages": file.schedule.num_stages,
        "microbatches": file.schedule.num_microbatches,
        "actions": sum(len(row) for row in file.schedule.order),
        "faults": [
            {
                "what": fault.what,
                "where": fault.where,
                "needed": None if fault.needed is None else str(fault.needed),
                "given": None if fault.given is None else str(fault.given),
                "fix": fault.fix,
            }
            for fault in found
        ],
    }
