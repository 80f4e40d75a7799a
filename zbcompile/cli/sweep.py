"""``zbcompile sweep``: a plan for every combination of some choices, and which of them nothing beats."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zbcompile.cli.hf_config import add_config_options
from zbcompile.cli.inputs import costs_of, load_on_ranks
from zbcompile.cli.shared_options import (
    Parser,
    add_output,
    add_problem_options,
    add_profile,
    add_rank_speeds,
    add_recompute,
    add_search_options,
    output,
    positive,
    words,
)
from zbcompile.cli.short_form import add_cost_options
from zbcompile.errors import UsageError, ZBCompileError
from zbcompile.formats.fields import format_json
from zbcompile.formats.streams import check_output, rewrite_line, say
from zbcompile.schedule.ir import PLACEMENTS
from zbcompile.schedule.problem import OBJECTIVES, TRANSPORTS

if TYPE_CHECKING:
    from zbcompile.planner.sweep import Choice, Swept

__all__ = ["add_options", "run"]

_AXES = (
    *("ranks", "placement", "stages_per_rank", "microbatches", "cap", "transport"),
    *("device", "rank_speeds", "recompute"),
)
"""Options that take several values."""

_MOST = 1000
"""Most combinations."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = "Options of several values: each combination is planned."
    add_profile(parser)
    parser.add_argument("--cap", type=words, nargs="+", metavar="BYTES", help="memory per rank, as in plan")
    parser.add_argument(
        "--placement",
        type=words,
        nargs="+",
        help="linear, looped[:K], v[:K] (K stages per rank), or the rank of every stage as 0,1,1,0",
    )
    parser.add_argument(
        "--stages-per-rank",
        type=positive,
        nargs="+",
        metavar="K",
        help="the K of looped and v where --placement leaves it out; 1 is linear",
    )
    parser.add_argument(
        "--ranks", type=positive, nargs="+", metavar="P", help="ranks that share the stages (one each)"
    )
    parser.add_argument(
        "--microbatches", type=positive, nargs="+", metavar="M", help="microbatches of a step (2 per rank)"
    )
    parser.add_argument("--transport", choices=TRANSPORTS, nargs="+", help="how sends behave (async)")
    add_rank_speeds(parser, several=True)
    add_recompute(parser, several=True)
    parser.add_argument("--objective", choices=OBJECTIVES, help="what to make short (span)")
    add_search_options(parser, 2.0, "seconds for every plan (2)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the rows as JSON")
    form.add_argument("--csv", action="store_true", help="the rows as CSV")
    parser.add_argument("--svg", type=output, metavar="FILE", help="where to write the plot as SVG")
    add_output(parser, "JSON or CSV")
    add_cost_options(parser)
    add_config_options(parser, several=True)


def run(arguments: argparse.Namespace) -> int:
    """Plan every combination; print the table, or JSON or CSV; return 1 if nothing fits, 130 after Ctrl-C."""
    from zbcompile.cli.console import draw
    from zbcompile.planner.sweep import sweep
    from zbcompile.show.sweep import sweep_csv, sweep_json, sweep_svg, sweep_table

    check_output()
    choices = list(_choices(arguments))
    _refuse_hopeless(choices)
    reporter = _Reporter(len(choices))
    try:
        rows = list(sweep(choices, seconds_each=arguments.time_limit, seed=arguments.seed, observer=reporter))
    finally:
        reporter.close()
    if arguments.json:
        arguments.output.write(format_json(sweep_json(rows)))
    elif arguments.csv:
        arguments.output.write(sweep_csv(rows))
    else:
        draw(sweep_table(rows), least=100)
    planned = any(row.value_ns is not None for row in rows)
    if arguments.svg is not None and planned:
        arguments.svg.write(sweep_svg(rows))
    if len(rows) < len(choices):
        say(f"interrupted after {len(rows)} of {len(choices)} plans")
        return 130
    return 0 if planned else 1


def _choices(arguments: argparse.Namespace) -> Iterator[Choice]:
    """Yield every combination of what was asked for, with its problem or why there is none."""
    from zbcompile.planner.sweep import Choice

    asked = {name: getattr(arguments, name) for name in _AXES if getattr(arguments, name) is not None}
    if not asked:
        raise UsageError(
            "there is nothing to choose from", fix="give several values for --cap, --microbatches, ..."
        )
    count = 1
    for values in asked.values():
        count *= len(values)
    if count > _MOST:
        raise UsageError("too many combinations", needed=f"at most {_MOST}", given=count)
    file = costs_of(arguments) if arguments.profile is not None else None
    for values in itertools.product(*asked.values()):
        chosen = dict(zip(asked, values, strict=True))
        shown = {name: str(value) for name, value in chosen.items()}
        try:
            problem = load_on_ranks(_one(arguments, chosen), file)
        except ZBCompileError as error:
            yield Choice(shown, None, error.what)
        else:
            yield Choice(shown, problem)


def _one(arguments: argparse.Namespace, chosen: Mapping[str, Any]) -> argparse.Namespace:
    """Return the options of one combination, as `plan` has them."""
    parser = Parser("zbcompile sweep", "One combination.")
    add_problem_options(parser)
    one = argparse.Namespace(**{**vars(parser.parse_args([])), **vars(arguments)})
    vars(one).update(dict.fromkeys(_AXES), **chosen)
    each, text = one.stages_per_rank, one.placement
    if text == "auto":
        raise UsageError("sweep names every placement", needed="linear, looped, v or a list of ranks")
    if each is not None:
        if text not in PLACEMENTS:
            raise UsageError(
                "--stages-per-rank goes with linear, looped and v", needed="a name without K", given=text
            )
        if (text == "linear") != (each == 1):
            raise UsageError(
                f"{text} with {each} stages per rank", needed="linear with 1, looped and v with more"
            )
        one.placement = text if each == 1 else f"{text}:{each}"
    return one


def _refuse_hopeless(choices: list[Choice]) -> None:
    """Refuse a value that goes with no others: it is a slip, and not one of many choices."""
    hopeful = {item for choice in choices if choice.problem is not None for item in choice.words.items()}
    for choice in choices:
        for name, value in choice.words.items():
            if (name, value) not in hopeful and (hopeful or name == next(reversed(choice.words))):
                raise UsageError(choice.refusal, where=f"--{name.replace('_', '-')} {value}")


class _Reporter:
    """Says on standard error how many plans are done: one line, rewritten, on a terminal; else nothing."""

    def __init__(self, count: int) -> None:
        self.count, self.rewrite = count, sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, done: int, swept: Swept) -> None:
        if self.rewrite:
            full = 30 * done // self.count
            words = " ".join(swept.words.values())
            rewrite_line(f"[{'=' * full}{' ' * (30 - full)}] {done} of {self.count}: {words}")

    def close(self) -> None:
        """End the line that was being rewritten."""
        if self.rewrite:
            rewrite_line("")
