"""``zbcompile bisect``: which rewrite of the graphs is behind a wrong gradient.

Exit codes: 0 nothing is wrong, 1 something is (named or not), 2 as everywhere. torch is imported when the
command runs.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zbcompile.cli.inputs import check_directory
from zbcompile.cli.shared_options import positive, words
from zbcompile.errors import UsageError, ZBCompileError
from zbcompile.formats.fields import format_json
from zbcompile.formats.streams import check_output, say, write_output

if TYPE_CHECKING:
    from zbcompile.compiler.bisect import Bisection, Fault

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = (
        "FACTORY as for profile. Exit codes: 0 nothing is wrong; 1 something is: the output names the "
        "rewrite without which it is right (ZBCOMPILE_SKIP=NAME compiles without it), or says that there "
        "is none; 2 the model cannot be built, captured, cut or run."
    )
    parser.add_argument("factory", type=words, help="where the model comes from: package.module:function")
    parser.add_argument("--stages", type=positive, required=True, metavar="N", help="number of stages")
    parser.add_argument(
        "--split-points", type=words, metavar="PATH,...", help="modules that begin stages 1, 2, ..."
    )
    parser.add_argument("--recompute", type=words, default="none", help="as for compile() (none)")
    parser.add_argument("--backend", type=words, default="eager", help="eager (the default) or inductor")
    parser.add_argument("--json", action="store_true", help="the result as JSON on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Compile without one rewrite after the other; return 1 if a value is wrong with all of them."""
    check_directory()
    check_output()
    from zbcompile.cli import factory
    from zbcompile.compiler.bisect import bisect
    from zbcompile.passes.split.rewrites import skipped_from_environment

    made = factory.build(arguments.factory)
    try:
        skipped = skipped_from_environment()
        if skipped:
            raise UsageError(
                "bisect leaves out one rewrite after the other by itself",
                where="ZBCOMPILE_SKIP",
                given=", ".join(sorted(skipped)),
                fix="unset ZBCOMPILE_SKIP",
            )
        found = bisect(
            made.model,
            arguments.stages,
            made.args,
            made.kwargs,
            target=None if made.loss_fn is None else made.target,
            loss_fn=made.loss_fn,
            split_points=arguments.split_points and arguments.split_points.split(","),
            recompute=arguments.recompute,
            backend=arguments.backend,
            report=_say,
        )
    except ZBCompileError as error:
        say(f"zbcompile bisect: {error}")
        return 2
    write_output(format_json(_figures(found)) if arguments.json else f"{found}\n")
    return 0 if found.fault is None else 1


def _say(skipped: tuple[str, ...], fault: Fault | None) -> None:
    say(f"without {', '.join(skipped) or 'leaving any out'}: {'right' if fault is None else fault}")


def _figures(found: Bisection) -> dict[str, object]:
    fault = found.fault
    return {
        "ok": fault is None,
        "rewrites": list(found.rewrites),
        "first_wrong": found.first_wrong,
        "in_required": found.in_required,
        "fault": fault
        and {
            "what": fault.what,
            "where": fault.where,
            "relative_error": fault.relative_error
            if fault.size and fault.relative_error < float("inf")
            else None,
            "values": fault.count,
        },
        "trials": found.num_trials,
    }
