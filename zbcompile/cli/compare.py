"""``zbcompile compare``: the published orders and ours, at equal memory."""

from __future__ import annotations

import argparse

from zbcompile.cli.inputs import load_problem
from zbcompile.cli.shared_options import add_problem_options, add_search_options
from zbcompile.cli.short_form import add_cost_options
from zbcompile.formats.fields import format_json
from zbcompile.formats.streams import check_output, write_output

__all__ = ["add_options", "run"]

_LEAST_COLUMNS = 100


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_problem_options(parser)
    add_cost_options(parser)
    add_search_options(parser, 2.0, "seconds for every row (2)")
    parser.add_argument("--json", action="store_true", help="the table as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print every published order that applies, and ours within the same caps and at the memory of each."""
    from zbcompile.cli.console import draw
    from zbcompile.planner.compare import compare
    from zbcompile.show.comparison import comparison_json, comparison_table

    check_output()
    rows = compare(load_problem(arguments), seconds_per_row=arguments.time_limit, seed=arguments.seed)
    if arguments.json:
        write_output(format_json(comparison_json(rows)))
        return 0
    draw(comparison_table(rows), least=_LEAST_COLUMNS)
    return 0
