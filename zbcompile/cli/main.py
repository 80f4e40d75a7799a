"""The command line. Data goes to standard output, messages to standard error, ``-`` is a pipe.

Exit codes: 0 done, 1 a check failed or nothing fits, 2 usage, a broken file or an output that cannot be
written, 3 time limit without an order, 130 interrupted (the best order so far is still written).

Each command is a module with ``add_options(parser)`` and ``run(arguments) -> int``. `main` imports only the
module of the command that was asked for. That module imports torch and the planner when it runs, so that no
query loads them and ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from zbcompile import __version__
from zbcompile.cli.shared_options import Parser
from zbcompile.errors import ZBCompileError
from zbcompile.formats.streams import ReaderGoneError, hold_descriptors, say

__all__ = ["COMMANDS", "Command", "build_parser", "main"]


class Command(NamedTuple):
    """A command of the command line.

    Attributes
    ----------
    name
        What the user types.
    module
        The module with ``add_options(parser)`` and ``run(arguments) -> int``.
    help
        What it does, in one line.
    example
        A call of it that runs in the repository's folder; ``--help`` ends with it.
    """

    name: str
    module: str
    help: str
    example: str


_PLAN = "examples/four-unequal-stages.schedule.json"
_COSTS = "examples/profiles/four-unequal-stages.json"

COMMANDS = (
    Command(
        "demo",
        "zbcompile.cli.demo",
        "compile a GPT-2 into 4 stages, plan it, draw it, train it on 4 processes and compare with autograd",
        "zbcompile demo --steps 1",
    ),
    Command(
        "plan",
        "zbcompile.cli.plan",
        "find the best order for a profile; schedule JSON on standard output, progress on standard error",
        f"zbcompile plan {_COSTS} -o plan.json",
    ),
    Command(
        "show",
        "zbcompile.cli.show",
        "draw a schedule: work, bubbles, messages and memory, to scale",
        f"zbcompile show {_PLAN} --from 20% --to 60%",
    ),
    Command(
        "check",
        "zbcompile.cli.check",
        "judge a schedule: complete, in order, free of deadlock, under the cap; exit code 1 if not",
        f"zbcompile check {_PLAN} --certificate",
    ),
    Command(
        "explain",
        "zbcompile.cli.explain",
        "say why an order is as long as it is, and what else would pay",
        f"zbcompile explain {_PLAN} --rank 3 --at 40ms",
    ),
    Command(
        "diff",
        "zbcompile.cli.diff",
        "where two schedules differ; exit code 1 if they do",
        f"zbcompile diff {_PLAN} plan.json",
    ),
    Command(
        "compare",
        "zbcompile.cli.compare",
        "every classic order and ours, at equal memory",
        f"zbcompile compare {_COSTS} --time-limit 1",
    ),
    Command(
        "sweep",
        "zbcompile.cli.sweep",
        "plan many combinations: step time against memory, and the best",
        f"zbcompile sweep {_COSTS} --cap 11GiB 12GiB --time-limit .2",
    ),
    Command(
        "convert",
        "zbcompile.cli.convert",
        "turn a schedule into another form",
        f"zbcompile convert {_PLAN} --to csv -o plan.csv",
    ),
    Command(
        "profile",
        "zbcompile.cli.profile",
        "cut a model into stages and measure or count what they cost; profile JSON on standard output",
        "zbcompile profile examples/models.py:mlp --stages 2 -o costs.json",
    ),
    Command(
        "bisect",
        "zbcompile.cli.bisect",
        "compare a model's stages with plain autograd and name the rewrite behind a wrong gradient",
        "zbcompile bisect examples/models.py:mlp --stages 2",
    ),
    Command(
        "rehearse",
        "zbcompile.cli.rehearse",
        "run a schedule on real processes with sleeping compute; planned against measured",
        f"zbcompile rehearse {_PLAN} --steps 1",
    ),
    Command(
        "selftest",
        "zbcompile.cli.selftest",
        "run stages, messages and steps on this machine's GPU or CPU and report every figure",
        "zbcompile selftest --device cpu --only held",
    ),
    Command(
        "schema",
        "zbcompile.cli.schema",
        "print the JSON Schema of a file format",
        "zbcompile schema schedule",
    ),
    Command(
        "completion",
        "zbcompile.cli.completion",
        "print a script that completes commands and options in bash, zsh or fish",
        "zbcompile completion bash",
    ),
)


def build_parser(names: Collection[str] | None = None) -> argparse.ArgumentParser:
    """Build the parser of the command line.

    Parameters
    ----------
    names
        The commands that get their options; all if left out. The parser knows the other commands by name and
        help only, and their modules are not imported.
    """
    parser = Parser(
        "zbcompile",
        "Pipeline-parallel training in PyTorch with provably best orders.",
        "exit codes: 0 done; 1 check failed or nothing fits; 2 usage, broken file or unwritable output; "
        "3 time limit without an order; 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"zbcompile {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.help, description=command.help)
        if names is None or command.name in names:
            module = importlib.import_module(command.module)
            module.add_options(own)
            own.epilog = "\n".join(filter(None, (own.epilog, "example:", f"  {command.example}")))
            own.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. A known error becomes one message on standard error."""
    words = sys.argv[1:] if argv is None else argv
    command = next((word for word in words if not word.startswith("-")), "")
    hold_descriptors()
    try:
        return _run(command, words)
    except ReaderGoneError as error:
        return error.exit_code
    except ZBCompileError as error:
        say(f"zbcompile {command}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted(command)
    except ImportError as error:
        # Ctrl-C while a compiled package is loaded comes out as a failed import.
        if not isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            raise
        return _interrupted(command)


def _run(command: str, words: Sequence[str]) -> int:
    """Parse and run; argparse ends by itself for ``--help`` (0) and for wrong arguments (2)."""
    with _rare_collections():
        try:
            arguments = build_parser({command}).parse_args(words)
        except SystemExit as done:
            return done.code if isinstance(done.code, int) else 2
        code: int = arguments.run(arguments)
        return code


def _interrupted(command: str) -> int:
    say(f"zbcompile {command}: interrupted")
    return 130


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage rarely: orders are large without cycles; the usual pace takes a third of the time."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 30, 30)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
