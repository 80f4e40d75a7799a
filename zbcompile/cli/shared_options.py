"""Options and argument types that several commands share."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from zbcompile.cli.hints import hint
from zbcompile.errors import UsageError
from zbcompile.formats.files import Output
from zbcompile.formats.streams import say, write_output
from zbcompile.schedule.ir import MAX_COUNT
from zbcompile.schedule.limits import MOST_SEED
from zbcompile.schedule.problem import ACCUMULATE, OBJECTIVES, TRANSPORTS

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = [
    "EACH",
    "MAX_COLUMNS",
    "Parser",
    "add_jitter",
    "add_output",
    "add_profile",
    "add_problem_options",
    "add_rank_speeds",
    "add_recompute",
    "add_schedule_input",
    "add_search_options",
    "columns",
    "index",
    "output",
    "positive",
    "seconds",
    "seed",
    "words",
]

EACH = "each"
"""All send modes, one after the other."""

MAX_COLUMNS = 2000
"""Widest picture. Four lanes of 64 ranks at this width take some seconds."""

_WHOLE = re.compile("[0-9]{1,18}")
_DECIMAL = re.compile(r"([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})([eE][+-]?[0-9]{1,2})?")

_CAP_HELP = (
    "memory per rank: 4GiB, 512MiB, 8e9, or 1.5p (times what p microbatches hold on the rank, plus its "
    "static bytes; 1F1B needs 1p): one cap for all; a comma list gives each rank its own, 'none' no limit"
)
_ACCUMULATE_HELP = "sum gradients of weights in microbatch order, or as they come, so that none waits"
_KEPT_HELP = "count gradients of earlier steps that are still held when a step begins"
_PLACEMENT_HELP = (
    "linear, looped[:K], v[:K] (K stages per rank), the rank of every stage as 0,1,1,0, or auto: the best of "
    "those that fit --ranks"
)


def add_problem_options(parser: argparse.ArgumentParser, *, each_transport: bool = False) -> None:
    """Add the profile and the options of its problem; `zbcompile.cli.inputs.load_problem` reads them.

    Parameters
    ----------
    each_transport
        Whether ``--transport`` also takes `EACH`, which the command resolves itself.
    """
    add_profile(parser)
    parser.add_argument("--cap", type=words, metavar="BYTES", help=_CAP_HELP)
    parser.add_argument("--placement", type=words, help=_PLACEMENT_HELP)
    parser.add_argument("--ranks", type=positive, metavar="P", help="ranks that share the stages (one each)")
    parser.add_argument(
        "--microbatches", type=positive, metavar="M", help="microbatches of a step (2 per rank)"
    )
    parser.add_argument(
        "--microbatch-costs",
        type=words,
        metavar="FACTORS",
        help="times of every microbatch as a factor of the profile's: 1,1.3,.8x2,... (after the x: of bytes)",
    )
    parser.add_argument("--objective", choices=OBJECTIVES, help="what to make short (span)")
    modes = (*TRANSPORTS, EACH) if each_transport else TRANSPORTS
    parser.add_argument("--transport", choices=modes, help="how sends behave (async)")
    parser.add_argument("--accumulate", choices=ACCUMULATE, help=_ACCUMULATE_HELP + " (order)")
    parser.add_argument("--kept-gradients", action=argparse.BooleanOptionalAction, help=_KEPT_HELP + " (no)")


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add the profile; without one, costs are given by the options of `zbcompile.cli.short_form`."""
    parser.add_argument(
        "profile",
        type=words,
        nargs="?",
        help="profile, JSON or TOML, - for standard input; or give costs: --ranks 8 --f 18.5ms ...",
    )


def add_search_options(parser: argparse.ArgumentParser, time_limit_s: float, time_limit_help: str) -> None:
    """Add the time limit of a search and its seed."""
    parser.add_argument("--time-limit", type=seconds, default=time_limit_s, metavar="S", help=time_limit_help)
    parser.add_argument("--seed", type=seed, default=0, help="same seed, same bytes (0)")


def add_rank_speeds(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add ``--rank-speeds``, which `zbcompile.cli.inputs.parse_speeds` reads."""
    parser.add_argument(
        "--rank-speeds",
        type=words,
        metavar="S,S,...",
        nargs="+" if several else None,
        help="speed of every rank, 1 for that of the profile: 1,1,0.5,1",
    )


def add_recompute(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add ``--recompute``: whether variants of stages may be chosen."""
    parser.add_argument(
        "--recompute",
        choices=("none", "auto"),
        nargs="+" if several else None,
        help="none: stages as they are; auto: their variants are chosen from (auto, where there are any)",
    )


def add_jitter(parser: argparse.ArgumentParser) -> None:
    """Add ``--jitter``, which `zbcompile.cli.inputs.parse_jitter` reads."""
    parser.add_argument(
        "--jitter",
        type=words,
        metavar="T",
        help="what is left of the gain over 1F1B under random latency, in place of the profile's: "
        "5ms on the mean (exponential:5ms), or uniform:5ms",
    )


def add_schedule_input(parser: argparse.ArgumentParser) -> None:
    """Add the schedule, its costs and limits; `zbcompile.cli.inputs.load_scheduled` reads them."""
    parser.add_argument(
        "schedule",
        type=words,
        help="schedule JSON, torch's schedule CSV or the text form; - for standard input",
    )
    parser.add_argument(
        "--profile", type=words, metavar="FILE", help="costs to use instead of the schedule's own"
    )
    parser.add_argument("--cap", type=words, metavar="BYTES", help=_CAP_HELP)
    parser.add_argument("--transport", choices=TRANSPORTS, help="how sends behave")
    parser.add_argument("--accumulate", choices=ACCUMULATE, help=_ACCUMULATE_HELP)
    parser.add_argument("--kept-gradients", action=argparse.BooleanOptionalAction, help=_KEPT_HELP)


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``-o``: where the command writes its result; standard output if left out."""
    parser.add_argument(
        "-o", "--output", type=output, default="-", metavar="FILE", help=f"where to write {what}"
    )


class _Help(argparse.HelpFormatter):
    """Wraps a text line by line; one that is indented, an example, stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.split("\n")
        return "\n".join(
            line if line.startswith(" ") else super(_Help, self)._fill_text(line, width, indent)
            for line in lines
        )


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and writes through `zbcompile.formats.streams`."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog, description=description, epilog=epilog, allow_abbrev=False, formatter_class=_Help
        )

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does, but let a command say itself what it does not know."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Write help and version as data, the rest as talk."""
        if file is None or file is not sys.stdout:
            say(message.rstrip("\n"))
        else:
            write_output(message)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments and what was probably meant, and end with 2."""
        meant = hint(message, self._option_string_actions)
        lines = f"{self.format_usage()}{self.prog}: error: {message}"
        say(f"{lines}\n{meant}" if meant else lines)
        self.exit(2)


def _whole(text: str, low: int, high: int) -> int:
    """Read a whole number in plain digits, in a range."""
    if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {low} to {high}")
    return int(text)


def positive(text: str) -> int:
    """Read a whole number from 1 to 2^20, the most that a file may state.

    Raises
    ------
    argparse.ArgumentTypeError
        It is not.
    """
    return _whole(text, 1, MAX_COUNT)


def index(text: str) -> int:
    """Read a number that counts from 0; raises as `positive`."""
    return _whole(text, 0, MAX_COUNT)


def columns(text: str) -> int:
    """Read a width in columns; raises as `positive`."""
    return _whole(text, 1, MAX_COLUMNS)


def seed(text: str) -> int:
    """Read the seed of a search, which the solver keeps in 32 bits; raises as `positive`."""
    return _whole(text, 0, MOST_SEED)


def seconds(text: str) -> float:
    """Read a time in seconds, at least a nanosecond and less than 10 million seconds.

    Raises
    ------
    argparse.ArgumentTypeError
        It is not.
    """
    value = float(text) if _DECIMAL.fullmatch(text) else 0.0
    if not 1e-9 <= value < 1e7:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds below 10 million")
    return value


def words(text: str) -> str:
    """Read any text but an empty one: an option that is given says something.

    Raises
    ------
    argparse.ArgumentTypeError
        It is empty.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty")
    return text


def output(text: str) -> Output:
    """Read where to write, and check that it can be written.

    Raises
    ------
    argparse.ArgumentTypeError
        It cannot.
    """
    try:
        return Output.to(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
