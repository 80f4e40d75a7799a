"""Options and argument types that several commands share."""

from __future__ import annotations

import argparse

from zbcompile.schedule.problem import OBJECTIVES, TRANSPORTS

__all__ = ["add_problem_options", "add_schedule_input", "add_search_options", "positive", "seconds"]

_CAP_HELP = (
    "memory per rank: 4GiB, 512MiB, 8e9, or 1.5p (times what p microbatches hold on the rank, plus its "
    "static bytes; 1F1B needs 1p); a comma list gives one per rank, 'none' for no limit"
)
_PLACEMENT_HELP = (
    "linear, looped[:K], v[:K] (K stages per rank), the rank of every stage as 0,1,1,0, or auto: the best of "
    "those that fit --ranks"
)


def add_problem_options(parser: argparse.ArgumentParser) -> None:
    """Add the profile and the options of its problem; `zbcompile.cli.inputs.load_problem` reads them."""
    parser.add_argument("profile", help="profile JSON, - for standard input")
    parser.add_argument("--cap", metavar="BYTES", help=_CAP_HELP)
    parser.add_argument("--placement", help=_PLACEMENT_HELP)
    parser.add_argument("--ranks", type=positive, metavar="P", help="ranks that share the stages (one each)")
    parser.add_argument(
        "--microbatches", type=positive, metavar="M", help="microbatches of a step (2 per rank)"
    )
    parser.add_argument("--objective", choices=OBJECTIVES, help="what to make short (span)")
    parser.add_argument("--transport", choices=TRANSPORTS, help="how sends behave (async)")


def add_search_options(parser: argparse.ArgumentParser, time_limit_s: float, time_limit_help: str) -> None:
    """Add the time limit of a search and its seed."""
    parser.add_argument("--time-limit", type=seconds, default=time_limit_s, metavar="S", help=time_limit_help)
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (0)")


def add_schedule_input(parser: argparse.ArgumentParser) -> None:
    """Add the schedule, its costs and limits; `zbcompile.cli.inputs.load_scheduled` reads them."""
    parser.add_argument(
        "schedule", help="schedule JSON, torch's schedule CSV or the text form; - for standard input"
    )
    parser.add_argument("--profile", metavar="FILE", help="costs to use instead of the schedule's own")
    parser.add_argument("--cap", metavar="BYTES", help=_CAP_HELP)
    parser.add_argument("--transport", choices=TRANSPORTS, help="how sends behave")


def positive(text: str) -> int:
    """Read a whole number of at least 1.

    Raises
    ------
    ValueError, argparse.ArgumentTypeError
        It is not.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def seconds(text: str) -> float:
    """Read a time in seconds, more than 0 and less than 10 million.

    Raises
    ------
    ValueError, argparse.ArgumentTypeError
        It is not.
    """
    value = float(text)
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value
