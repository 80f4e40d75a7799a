"""The command line. Data goes to standard output, talk to standard error, ``-`` is a pipe.

Exit codes: 0 done, 1 a check failed or nothing fits, 2 usage or a broken file, 3 time limit without
an order, 130 interrupted (the best order so far is still written).

Each command lives in a module that is imported when it runs: a query never loads torch.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zbcompile import __version__
from zbcompile.cli.options import add_commands
from zbcompile.errors import ZBCompileError

__all__ = ["build_parser", "main"]


def build_parser() -> argparse.ArgumentParser:
    """The whole command line, without running anything."""
    parser = argparse.ArgumentParser(
        prog="zbcompile",
        description="Pipeline-parallel training in PyTorch with provably best orders.",
        epilog="exit codes: 0 done; 1 check failed or nothing fits; 2 usage or broken file; "
        "3 time limit without an order; 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"zbcompile {__version__}")
    add_commands(parser.add_subparsers(dest="command", metavar="COMMAND", required=True))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code. Known errors become one message."""
    arguments = build_parser().parse_args(argv)
    module, name = arguments.run.split(":")
    try:
        with _rare_collections():
            code: int = getattr(importlib.import_module(module), name)(arguments)
        sys.stdout.flush()
        return code
    except ZBCompileError as error:
        print(f"zbcompile {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted(arguments.command)
    except ImportError as error:
        # Ctrl-C while a compiled package is loaded comes out as a failed import.
        if not isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            raise
        return _interrupted(arguments.command)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _interrupted(command: str) -> int:
    print(f"zbcompile {command}: interrupted", file=sys.stderr)
    return 130


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Orders are large and hold no cycles: collecting as often as Python does costs a third of the time."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 30, 30)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
