"""``zbcompile explain``: why an order is as long as it is, and with ``--what-if`` what else would pay.

The planner is imported for ``--what-if`` alone.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Group

from zbcompile.cli.changes import CHANGES_HELP, read_changes, usual_changes
from zbcompile.cli.console import draw
from zbcompile.cli.inputs import load_scheduled, parse_jitter, parse_time
from zbcompile.cli.shared_options import add_jitter, add_schedule_input, index, seconds, seed, words
from zbcompile.errors import UsageError
from zbcompile.formats import measured_json
from zbcompile.formats.fields import format_json
from zbcompile.formats.files import read_text
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.formats.streams import check_output, rewrite_line, say, write_output
from zbcompile.show.baseline import one_f_one_b
from zbcompile.show.explain import Explanation, explained
from zbcompile.show.explain_json import explanation_json
from zbcompile.show.explain_words import explanation_text
from zbcompile.show.prose import Prose
from zbcompile.show.summary import timeline_remarks

if TYPE_CHECKING:
    from zbcompile.planner.incumbent import Progress
    from zbcompile.schedule.replay import Jitter

__all__ = ["add_options", "run"]

_LEAST_COLUMNS = 80
_BUBBLES, _SECONDS = 3, 30.0
_FACTS = ("rank", "at", "bubbles", "measured")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_schedule_input(parser)
    parser.add_argument("--rank", type=index, metavar="R", help="what concerns one rank")
    parser.add_argument("--at", type=words, metavar="T", help="what ranks do at a time: 40ms, 1.5s or 30%%")
    parser.add_argument(
        "--bubbles", type=index, metavar="N", help=f"how many of the longest waits to follow ({_BUBBLES})"
    )
    parser.add_argument("--measured", type=words, metavar="FILE", help="what the step really cost")
    parser.add_argument("--json", action="store_true", help="the facts as JSON")
    parser.add_argument(
        "--what-if", action="append", nargs="?", const="", metavar="CHANGE", help=CHANGES_HELP
    )
    parser.add_argument(
        "--time-limit", type=seconds, metavar="S", help=f"seconds for all that --what-if plans ({_SECONDS:g})"
    )
    add_jitter(parser)
    parser.add_argument("--seed", type=seed, help="seed of --what-if and --jitter (0)")


def run(arguments: argparse.Namespace) -> int:
    """Explain a schedule; return 1 where its certificate does not hold."""
    _refuse_unused(arguments)
    jitter = None if arguments.jitter is None else parse_jitter(arguments.jitter)
    check_output()
    file = load_scheduled(arguments)
    if arguments.what_if is not None:
        return _what_if(arguments, file)
    if jitter is not None:
        return _jitter(arguments, file, jitter)
    found = explained(
        file,
        bubbles=_BUBBLES if arguments.bubbles is None else arguments.bubbles,
        rank=arguments.rank,
        at=None if arguments.at is None else partial(parse_time, arguments.at),
        measured=None
        if arguments.measured is None
        else measured_json.loads(read_text(arguments.measured), arguments.measured),
    )
    _say_remarks(found)
    if arguments.json:
        write_output(format_json(explanation_json(found)))
    else:
        draw(explanation_text(found, arguments.rank), least=_LEAST_COLUMNS)
    fault = None if found.proof is None else found.proof.fault
    if fault is not None:
        say(f"fault: {fault}")
    return 0 if fault is None else 1


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuse options that would be ignored beside what else is asked."""
    asks = {"--what-if": arguments.what_if is not None, "--jitter": arguments.jitter is not None}
    asked = [name for name, is_asked in asks.items() if is_asked]
    if len(asked) > 1:
        raise UsageError("--what-if and --jitter are two questions", fix="ask one after the other")
    idle = list(_FACTS) if asked else ["seed"]
    if "--what-if" not in asked:
        idle.append("time_limit")
    for name in idle:
        if getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            beside = f"with {asked[0]}" if name in _FACTS else "without --what-if"
            raise UsageError(f"{option} says nothing {beside}", fix=f"leave {option} out")


def _jitter(arguments: argparse.Namespace, file: ScheduleFile, jitter: Jitter) -> int:
    """Say what is left of the gain over 1F1B under random latency."""
    from zbcompile.show.jitter import jitter_json, jitter_lines, jittered

    if file.problem is None:
        raise UsageError("--jitter needs costs", fix="give --profile PROFILE.json")
    baseline = one_f_one_b(file.problem)
    found = jittered(file.schedule, file.problem, baseline, jitter, arguments.seed or 0)
    if arguments.json:
        write_output(format_json(jitter_json(found)))
    else:
        draw(Group(*map(Prose, jitter_lines(found))), least=_LEAST_COLUMNS)
    return 0


def _say_remarks(found: Explanation) -> None:
    for remark in timeline_remarks(found.timeline):
        say(f"note: {remark}; `zbcompile check` says where")


def _what_if(arguments: argparse.Namespace, file: ScheduleFile) -> int:
    """Plan the step as it is and with every change; after an interrupt print what there is, return 130."""
    from zbcompile.planner.what_if import activation_worth, what_if
    from zbcompile.show.what_if import WhatIf, what_if_json, what_if_table

    if file.problem is None:
        raise UsageError("--what-if needs costs", fix="give --profile PROFILE.json")
    problem = file.problem if file.offered is None else file.problem.with_(profile=file.offered)
    found = explained(file, bubbles=0)
    value = found.timeline.value_ns
    changes = read_changes([text for text in arguments.what_if if text], problem)
    if "" in arguments.what_if:
        changes += usual_changes(problem, value, _most_crossed(found))
    reporter = _Reporter()
    outcomes = what_if(
        problem,
        file.schedule,
        changes,
        variants=file.variants,
        time_limit_s=_SECONDS if arguments.time_limit is None else arguments.time_limit,
        seed=arguments.seed or 0,
        observer=reporter,
    )
    base, rows = next(outcomes), []
    held = found.proof is not None and found.proof.fault is None
    if held and file.certificate is not None and base.bound_ns is not None:  # its problem is the file's
        base = replace(base, bound_ns=max(base.bound_ns, file.certificate.bound_ns))
    while not reporter.interrupted:
        row = next(outcomes, None)
        if row is None:
            break
        rows.append(row)
    reporter.close()
    result = WhatIf(problem, value, base, rows, activation_worth(problem))
    if arguments.json:
        write_output(format_json(what_if_json(result)))
    else:
        draw(what_if_table(result), least=_LEAST_COLUMNS)
    return 130 if reporter.interrupted else 0


def _most_crossed(found: Explanation) -> tuple[int, int] | None:
    """Return the link that the critical path crosses most often, the first of several."""
    path = found.path
    crossings = (sorted((a.rank, b.rank)) for a, b in zip(path, path[1:], strict=False) if a.rank != b.rank)
    count = Counter((low, high) for low, high in crossings)
    return max(count, key=lambda pair: (count[pair], -pair[0], -pair[1]), default=None)


class _Reporter:
    """Says on a terminal what is being planned, and notes an interrupt."""

    def __init__(self) -> None:
        self.interrupted, self.said = False, ""
        self.rewrite = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, name: str, progress: Progress) -> None:
        self.interrupted |= progress.interrupted
        if self.rewrite and name != self.said:
            self.said = name
            rewrite_line(f"planning: {name}")

    def close(self) -> None:
        """End the line that was being rewritten."""
        if self.said:
            rewrite_line("")
