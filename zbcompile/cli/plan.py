"""``zbcompile plan``: finds the best order for a profile.

The planner proper is imported when the command runs: its solver takes most of a second to load.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from zbcompile.cli.cut_inputs import load_cut_problems
from zbcompile.cli.hf_config import add_config_options
from zbcompile.cli.inputs import load_problem, parse_jitter, parse_speeds
from zbcompile.cli.shared_options import (
    add_jitter,
    add_output,
    add_problem_options,
    add_rank_speeds,
    add_recompute,
    add_search_options,
    positive,
    words,
)
from zbcompile.cli.short_form import add_cost_options
from zbcompile.compiler.lower import lower
from zbcompile.errors import UsageError
from zbcompile.formats import schedule_json
from zbcompile.formats.streams import rewrite_line, say
from zbcompile.schedule.solution import Solution
from zbcompile.schedule.speeds import on_ranks
from zbcompile.show.baseline import Baseline
from zbcompile.show.head import split_words
from zbcompile.show.summary import cuts_line, gradients_line, origin_words, proof_line, spread_line, summarize
from zbcompile.show.units import time_unit

if TYPE_CHECKING:
    from zbcompile.compiler.lower import LoweredPlan
    from zbcompile.planner.plan import Progress
    from zbcompile.schedule.replay import Jitter

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = "Options win over what the profile file says."
    add_problem_options(parser)
    add_cost_options(parser)
    add_config_options(parser)
    parser.add_argument(
        "--stages",
        type=positive,
        metavar="N",
        help="join the profile's stages, as pieces, into N: the cuts are chosen with the order",
    )
    add_rank_speeds(parser)
    add_recompute(parser)
    add_search_options(parser, 10.0, "seconds (10)")
    parser.add_argument("--fuse", choices=("auto", "never", "always"), default="auto", help="fused BW (auto)")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        type=words,
        metavar="PART",
        help="leave a part of the planner out; may be repeated",
    )
    add_jitter(parser)
    add_output(parser, "the schedule (standard output)")
    parser.add_argument("--quiet", action="store_true", help="no progress")


class _Reporter:
    """Writes progress to standard error: one line, rewritten, on a terminal; a line per change elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet, self.interrupted, self.last = quiet, False, ""
        self.rewrite = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        self.interrupted |= progress.interrupted
        if self.quiet:
            return
        unit = time_unit(progress.bound_ns)
        fields = [f"{progress.seconds:6.2f} s", f"bound {unit.text(progress.bound_ns)}"]
        if progress.best_ns is not None:
            gap = 1.0 - progress.bound_ns / progress.best_ns if progress.best_ns else 0.0
            fields[1:1] = [f"best {unit.text(progress.best_ns)}"]
            fields.append(f"gap {100 * gap:.2f} %")
        line = "  ".join([*fields, progress.step])
        if line[9:] == self.last[9:]:
            return
        self.last = line
        if self.rewrite:
            rewrite_line(line)
        else:
            say(line)

    def close(self) -> None:
        """End the line that was being rewritten."""
        if self.rewrite and self.last:
            rewrite_line("")
            self.last = ""


def run(arguments: argparse.Namespace) -> int:
    """Plan a profile and write the order; after an interrupt write the best so far and return 130."""
    jitter = None if arguments.jitter is None else parse_jitter(arguments.jitter)
    if jitter is not None and arguments.quiet:
        raise UsageError("--jitter says nothing with --quiet", fix="leave one of them out")
    reporter = _Reporter(quiet=arguments.quiet)
    try:
        solution = _found(arguments, reporter)
    finally:
        reporter.close()
    try:
        plan = lower(solution, merge=arguments.fuse != "never")
    except KeyboardInterrupt:
        arguments.output.write(schedule_json.dumps(solution))
        raise
    arguments.output.write(schedule_json.dumps(plan.solution))
    if not arguments.quiet:
        _say_summary(plan, jitter, arguments)
    return 130 if reporter.interrupted else 0


def _say_summary(plan: LoweredPlan, jitter: Jitter | None, arguments: argparse.Namespace) -> None:
    """Say what the plan gains, what is proved, and what is left of the gain under jitter."""
    from zbcompile.planner.rivals import Rival, rivals
    from zbcompile.show.gain import gain_line
    from zbcompile.show.jitter import jitter_lines, jittered

    solution = plan.solution
    summary = summarize(schedule_json.ScheduleFile.of(solution), plan.timeline)
    others = rivals(solution.problem)
    if len(set(parse_speeds(arguments.rank_speeds, solution.problem.num_ranks))) > 1:
        why = "stages would be on ranks of another speed"
        others = [Rival(rival.name, rival.halves, rival.problem, why=why) for rival in others]
        if solution.problem.num_stages != solution.problem.num_ranks:
            summary = replace(summary, baseline=Baseline(None, why))
    lines = [
        gain_line(summary, others),
        proof_line(summary),
        cuts_line(summary),
        origin_words(summary),
        split_words(solution.schedule),
        gradients_line(summary),
        spread_line(summary),
    ]
    if jitter is not None:
        lines += jitter_lines(
            jittered(solution.schedule, solution.problem, summary.baseline, jitter, arguments.seed)
        )
    for line in filter(None, lines):
        say(line)


def _found(arguments: argparse.Namespace, reporter: _Reporter) -> Solution:
    """Plan for one placement, or with ``--placement auto`` for all that fit; ``--stages`` cuts as well."""
    from zbcompile.planner.placements import plan_auto
    from zbcompile.planner.plan import plan

    if arguments.stages is not None:
        return _cut_and_planned(arguments, reporter)
    problem = load_problem(arguments)
    speeds = parse_speeds(arguments.rank_speeds, problem.num_ranks)
    if arguments.placement != "auto":
        return plan(
            problem.with_(profile=on_ranks(problem.profile, problem.placement, speeds)),
            time_limit_s=arguments.time_limit,
            seed=arguments.seed,
            observer=reporter,
            fuse=arguments.fuse,
            without=arguments.without,
        )
    result = plan_auto(
        problem,
        time_limit_s=arguments.time_limit,
        seed=arguments.seed,
        observer=reporter,
        fuse=arguments.fuse,
        without=arguments.without,
        speeds=speeds,
    )
    reporter.close()
    if not arguments.quiet:
        for tried in result.tried:
            say(tried)
    return result.solution


def _cut_and_planned(arguments: argparse.Namespace, reporter: _Reporter) -> Solution:
    """Choose the cuts with the order, for every placement that is asked for, and keep the best."""
    from zbcompile.planner.cuts import plan_cuts

    tasks = load_cut_problems(arguments)
    found = [
        plan_cuts(
            task,
            time_limit_s=arguments.time_limit / len(tasks),
            seed=arguments.seed,
            observer=reporter,
            fuse=arguments.fuse,
            without=arguments.without,
        )
        for task in tasks
    ]
    return min(found, key=lambda solution: solution.certificate.value_ns)
