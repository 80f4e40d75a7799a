"""``zbcompile compare``: the published orders and ours, at equal memory; or choices of splits and ours."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from zbcompile.cli.hf_config import add_config_options
from zbcompile.cli.inputs import load_on_ranks, load_problem, parse_speeds
from zbcompile.cli.shared_options import EACH, add_problem_options, add_rank_speeds, add_search_options
from zbcompile.cli.short_form import add_cost_options
from zbcompile.errors import UsageError
from zbcompile.formats.fields import format_json
from zbcompile.formats.streams import check_output, say, write_output

if TYPE_CHECKING:
    from zbcompile.planner.split_choices import SplitTable
    from zbcompile.schedule.problem import Problem

__all__ = ["add_options", "run"]

_LEAST_COLUMNS = 100
_STALL_S = 60.0
_STEPS = 3
"""Steps of a rehearsal; the fastest counts."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = (
        f"--transport {EACH} shows, under every send mode, what comes of splitting no backward, all, or by "
        "the rule of thumb (rank r its first r and last p - r, rank 0 none), beside ours, and says why."
    )
    add_problem_options(parser, each_transport=True)
    add_cost_options(parser)
    add_config_options(parser)
    add_rank_speeds(parser)
    add_search_options(parser, 2.0, "seconds for every row (2)")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help=f"with --transport {EACH}: run every row, one process per rank, with sleeping compute",
    )
    parser.add_argument("--json", action="store_true", help="the table as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print every published order that applies, and ours within the same caps and at the memory of each.

    With ``--transport each``: the choices of splits under every send mode.
    """
    from zbcompile.cli.console import draw
    from zbcompile.planner.compare import compare
    from zbcompile.show.comparison import comparison_json, comparison_table

    check_output()
    if arguments.transport == EACH:
        return _choices(arguments)
    if arguments.rehearse:
        raise UsageError("--rehearse runs choices of splits", fix=f"add --transport {EACH}")
    problem = load_problem(arguments)
    speeds = parse_speeds(arguments.rank_speeds, problem.num_ranks)
    rows = compare(problem, seconds_per_row=arguments.time_limit, seed=arguments.seed, speeds=speeds)
    if arguments.json:
        write_output(format_json(comparison_json(rows)))
        return 0
    draw(comparison_table(rows), least=_LEAST_COLUMNS)
    return 0


def _choices(arguments: argparse.Namespace) -> int:
    from zbcompile.cli.console import draw
    from zbcompile.planner.split_choices import split_choices
    from zbcompile.show.split_choices import split_choices_json, split_choices_table

    arguments.transport = None
    problem = load_on_ranks(arguments)
    if arguments.rehearse:
        _check_rehearsable(problem)
    tables = split_choices(problem, seconds_per_row=arguments.time_limit, seed=arguments.seed)
    rehearsed = _rehearsed(tables) if arguments.rehearse else None
    if arguments.json:
        write_output(format_json(split_choices_json(tables, rehearsed)))
    else:
        draw(split_choices_table(tables, rehearsed), least=_LEAST_COLUMNS)
    return 0 if all(made.ours.schedule is not None for made in tables) else 1


def _check_rehearsable(problem: Problem) -> None:
    if "WORLD_SIZE" in os.environ:
        raise UsageError(
            "compare starts the processes of its rehearsals itself",
            where="WORLD_SIZE",
            fix="run it without torchrun, or run one plan with `zbcompile rehearse` under torchrun",
        )
    if problem.num_ranks == 1:
        raise UsageError("an order on one rank sends nothing; there is nothing to rehearse")


def _rehearsed(tables: list[SplitTable]) -> dict[tuple[str, str], int]:
    """Rehearse every row and return its measured value in ns; torch is imported here."""
    from zbcompile.compiler.rehearsal import rehearse_each
    from zbcompile.planner.imported import rated

    solutions = {
        (made.problem.transport, row.name): rated(row.schedule, made.problem)
        for made in tables
        for row in made.rows
        if row.schedule is not None
    }
    if not solutions:
        return {}
    say(f"rehearsing {len(solutions)} orders")
    seconds = sum(solution.certificate.value_ns for solution in solutions.values()) / 1e9
    ran = rehearse_each(
        list(solutions.values()), stall_limit_s=_STALL_S, timeout_s=120 + 10 * _STEPS * seconds, steps=_STEPS
    )
    return {
        key: found.measured_span_ns if tables[0].problem.objective == "span" else found.measured_ns
        for key, found in zip(solutions, ran, strict=True)
    }
