"""``zbcompile schema``: prints the JSON Schema of a file format."""

from __future__ import annotations

import argparse

from zbcompile.formats.schemas import SCHEMAS, schema_text
from zbcompile.formats.streams import write_output

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("name", nargs="?", help=f"one of {', '.join(SCHEMAS)}; without one, their names")


def run(arguments: argparse.Namespace) -> int:
    """Print a JSON Schema, or the names of all."""
    write_output("\n".join(SCHEMAS) + "\n" if arguments.name is None else schema_text(arguments.name))
    return 0
