"""``zbcompile plan`` and ``zbcompile compare``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from zbcompile.cli.inputs import load_problem, say
from zbcompile.formats import schedule_json
from zbcompile.formats.files import write_text
from zbcompile.planner.placements import plan_auto
from zbcompile.planner.plan import Progress
from zbcompile.planner.plan import plan as find_order
from zbcompile.schedule.check import checked_times
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline
from zbcompile.schedule.solution import Certificate, Solution
from zbcompile.show.summary import headline, plan_of, proof_line
from zbcompile.show.units import time_unit

__all__ = ["plan", "with_communication"]


class _Reporter:
    """Progress on standard error: one line that is rewritten on a terminal, a line per change elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet, self.interrupted, self.last = quiet, False, ""
        self.rewrite = sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        self.interrupted |= progress.step == "interrupted"
        if self.quiet:
            return
        unit = time_unit(progress.bound_ns)
        words = [f"{progress.seconds:6.2f} s", f"bound {unit.text(progress.bound_ns)}"]
        if progress.best_ns is not None:
            gap = 1.0 - progress.bound_ns / progress.best_ns if progress.best_ns else 0.0
            words[1:1] = [f"best {unit.text(progress.best_ns)}"]
            words.append(f"gap {100 * gap:.2f} %")
        line = "  ".join([*words, progress.step])
        if line[9:] == self.last[9:]:
            return
        self.last = line
        if self.rewrite:
            sys.stderr.write(f"\r\x1b[2K{line}")
            sys.stderr.flush()
        else:
            say(line)

    def close(self) -> None:
        """End the line that was being rewritten."""
        if self.rewrite and self.last:
            sys.stderr.write("\n")
            self.last = ""


def plan(arguments: argparse.Namespace) -> int:
    """Plan a profile; 130 after an interrupt, with the best order so far written."""
    problem = load_problem(arguments)
    reporter = _Reporter(quiet=arguments.quiet)
    try:
        solution = _found(problem, arguments, reporter)
    finally:
        reporter.close()
    solution, timeline = with_communication(solution)
    write_text(arguments.output, schedule_json.dumps(solution))
    if not arguments.quiet:
        drawn = plan_of(schedule_json.ScheduleFile.of(solution), timeline)
        say(headline(drawn))
        say(proof_line(drawn))
    return 130 if reporter.interrupted else 0


def _found(problem: Problem, arguments: argparse.Namespace, reporter: _Reporter) -> Solution:
    """One placement, or the best of all that fit with ``--placement auto``."""
    if arguments.placement != "auto":
        return find_order(
            problem,
            time_limit_s=arguments.time_limit,
            seed=arguments.seed,
            observer=reporter,
            fuse=arguments.fuse,
        )
    result = plan_auto(
        problem,
        time_limit_s=arguments.time_limit,
        seed=arguments.seed,
        observer=reporter,
        fuse=arguments.fuse,
    )
    reporter.close()
    if not arguments.quiet:
        for tried in result.tried:
            say(tried)
    return result.solution


def with_communication(solution: Solution) -> tuple[Solution, Timeline]:
    """The solution with its sends and receives in the order, judged and timed again; the bound stays."""
    schedule, old = insert_communication(solution.schedule, solution.problem), solution.certificate
    timeline = checked_times(schedule, solution.problem)
    certificate = Certificate(old.objective, timeline.value_ns, old.bound_ns, old.method, old.witness)
    return replace(solution, schedule=schedule, certificate=certificate), timeline
