"""What every command takes. Nothing heavy is imported here: `zbcompile --help` is instant."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zbcompile.schedule.problem import OBJECTIVES, TRANSPORTS

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_commands"]

_CAP_HELP = (
    "memory per rank: 4GiB, 512MiB, 8e9, or 1.5p (times what p microbatches hold on the rank, plus its "
    "static bytes; 1F1B needs 1p); a comma list gives one per rank, 'none' for no limit"
)
_PLACEMENT_HELP = (
    "linear, looped[:K], v[:K] (K stages per rank), the rank of every stage as 0,1,1,0, or auto: the best of "
    "those that fit --ranks"
)


def add_commands(commands: Commands) -> None:
    """Every command with its options; ``run`` names the function that carries it out."""
    _demo(commands)
    _plan(commands)
    _show(commands)
    _check(commands)
    _compare(commands)
    _convert(commands)
    _profile(commands)
    _rehearse(commands)
    _schema(commands)


def _new(
    commands: Commands, name: str, run: str, help_text: str, epilog: str = ""
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help_text, description=help_text, epilog=epilog or None)
    parser.set_defaults(run=run)
    return parser


def _demo(commands: Commands) -> None:
    parser = _new(
        commands,
        "demo",
        "zbcompile.cli.demo:demo",
        "compile a GPT-2 into 4 stages, plan it, draw it, train it on 4 processes and compare with autograd",
    )
    parser.add_argument("--steps", type=_positive, default=3, help="optimizer steps (3)")
    parser.add_argument("--microbatches", type=_positive, default=8, help="microbatches of a step (8)")
    parser.add_argument("--memory-limit", metavar="BYTES", help="per rank: 128MiB (the default), 1GiB, ...")
    parser.add_argument("--json", action="store_true", help="the result as JSON on standard output")


def _problem_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cap", metavar="BYTES", help=_CAP_HELP)
    parser.add_argument("--placement", help=_PLACEMENT_HELP)
    parser.add_argument("--ranks", type=_positive, metavar="P", help="ranks that share the stages (one each)")
    parser.add_argument(
        "--microbatches", type=_positive, metavar="M", help="microbatches of a step (2 per rank)"
    )
    parser.add_argument("--objective", choices=OBJECTIVES, help="what to make short (span)")
    parser.add_argument("--transport", choices=TRANSPORTS, help="how sends behave (async)")


def _plan(commands: Commands) -> None:
    parser = _new(
        commands,
        "plan",
        "zbcompile.cli.plan:plan",
        "find the best order for a profile; schedule JSON on standard output, progress on standard error",
        "Options win over what the profile file says.",
    )
    parser.add_argument("profile", help="profile JSON, - for standard input")
    _problem_options(parser)
    parser.add_argument("--time-limit", type=_seconds, default=10.0, metavar="S", help="seconds (10)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (0)")
    parser.add_argument("--fuse", choices=("auto", "never", "always"), default="auto", help="fused BW (auto)")
    parser.add_argument("-o", "--output", default="-", help="where to write the schedule (standard output)")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _show(commands: Commands) -> None:
    parser = _new(
        commands,
        "show",
        "zbcompile.cli.show:show",
        "draw a schedule: work, bubbles, messages and memory, to scale",
    )
    _schedule_input(parser)
    parser.add_argument("--json", action="store_true", help="the figures as JSON instead of a picture")
    parser.add_argument("--measured", metavar="FILE", help="lay a measured timeline over the plan")
    parser.add_argument(
        "--from", dest="first", metavar="T", help="start of the part to draw: 20ms, 1.5s or 30%%"
    )
    parser.add_argument("--to", dest="last", metavar="T", help="end of the part to draw")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, help="memory lanes (to 16 ranks)")
    parser.add_argument(
        "--messages", action=argparse.BooleanOptionalAction, help="message lanes (to 16 ranks)"
    )
    parser.add_argument("--width", type=_positive, help="columns (the terminal's)")
    parser.add_argument("--svg", metavar="FILE", help="write the picture as SVG")
    parser.add_argument("--html", metavar="FILE", help="write the picture as HTML")


def _schedule_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "schedule", help="schedule JSON, torch's schedule CSV or the text form; - for standard input"
    )
    parser.add_argument("--profile", metavar="FILE", help="costs to use instead of the schedule's own")
    parser.add_argument("--cap", metavar="BYTES", help=_CAP_HELP)
    parser.add_argument("--transport", choices=TRANSPORTS, help="how sends behave")


def _check(commands: Commands) -> None:
    parser = _new(
        commands,
        "check",
        "zbcompile.cli.check:check",
        "judge a schedule: complete, in order, free of deadlock, under the cap; exit code 1 if not",
    )
    _schedule_input(parser)
    parser.add_argument("--certificate", action="store_true", help="prove the certificate's bound again")
    parser.add_argument("--json", action="store_true", help="the verdict as JSON")


def _compare(commands: Commands) -> None:
    parser = _new(
        commands, "compare", "zbcompile.cli.compare:compare", "every classic order and ours, at equal memory"
    )
    parser.add_argument("profile", help="profile JSON, - for standard input")
    _problem_options(parser)
    parser.add_argument(
        "--time-limit", type=_seconds, default=2.0, metavar="S", help="seconds for every row (2)"
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (0)")
    parser.add_argument("--json", action="store_true", help="the table as JSON")


def _convert(commands: Commands) -> None:
    parser = _new(
        commands,
        "convert",
        "zbcompile.cli.convert:convert",
        "turn a schedule into another form",
        "schedule: JSON. csv: torch's compute_comms. csv-compute: torch's compute_only. text: the IR's text. "
        "chrome: a trace for Perfetto (also from a measured timeline).",
    )
    _schedule_input(parser)
    parser.add_argument(
        "--to", required=True, choices=("schedule", "csv", "csv-compute", "text", "chrome"), help="the form"
    )
    parser.add_argument(
        "--communication",
        action=argparse.BooleanOptionalAction,
        help="put sends and receives in, or leave them out (as they are)",
    )
    parser.add_argument("-o", "--output", default="-", help="where to write (standard output)")


def _profile(commands: Commands) -> None:
    parser = _new(
        commands,
        "profile",
        "zbcompile.cli.profile:profile",
        "cut a model into stages and measure or count what they cost; profile JSON on standard output",
        "FACTORY is package.module:function or path.py:function. It is imported and called, and returns "
        "(model, example) or (model, example, loss_fn, target); example is a tuple of args or a dict.",
    )
    parser.add_argument("factory", help="where the model comes from: package.module:function")
    parser.add_argument("--stages", type=_positive, required=True, metavar="N", help="number of stages")
    parser.add_argument(
        "--device", help="count for this device of the table (such as H100) instead of measuring"
    )
    parser.add_argument("--microbatches", type=_positive, metavar="M", help="written into the profile")
    parser.add_argument("-o", "--output", default="-", help="where to write the profile (standard output)")


def _rehearse(commands: Commands) -> None:
    parser = _new(
        commands,
        "rehearse",
        "zbcompile.cli.rehearse:rehearse",
        "run a schedule on real processes with sleeping compute; planned against measured",
        "On a cluster: torchrun --nproc-per-node N -m zbcompile rehearse SCHEDULE.json",
    )
    _schedule_input(parser)
    parser.add_argument("--steps", type=_positive, default=3, help="steps to run; the fastest counts (3)")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.add_argument("--measured", metavar="FILE", help="write the measured timeline, for show --measured")
    parser.add_argument(
        "--calibrated", metavar="FILE", help="write the profile with measured links and host time"
    )


def _schema(commands: Commands) -> None:
    parser = _new(
        commands, "schema", "zbcompile.cli.convert:schema", "print the JSON Schema of a file format"
    )
    parser.add_argument("name", nargs="?", help="schedule, profile or measured; without one, their names")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value
