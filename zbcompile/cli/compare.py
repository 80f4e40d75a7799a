"""``zbcompile compare``."""

from __future__ import annotations

import argparse

from rich.console import Console

from zbcompile.cli.inputs import load_problem
from zbcompile.formats.fields import format_json
from zbcompile.formats.files import write_text
from zbcompile.planner.compare import compare as compare_orders
from zbcompile.show.comparison import comparison_json, comparison_table

__all__ = ["compare"]

_LEAST_COLUMNS = 100


def compare(arguments: argparse.Namespace) -> int:
    """Print every published order that applies, and ours within the same caps and at the memory of each."""
    rows = compare_orders(load_problem(arguments), seconds_per_row=arguments.time_limit, seed=arguments.seed)
    if arguments.json:
        write_text("-", format_json(comparison_json(rows)))
        return 0
    console = Console(highlight=False)
    if console.width < _LEAST_COLUMNS and not console.is_terminal:
        console = Console(highlight=False, width=_LEAST_COLUMNS)
    console.print(comparison_table(rows))
    return 0
