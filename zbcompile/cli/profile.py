"""``zbcompile profile``: a model's stages and what they cost.

torch is imported when the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zbcompile.cli.inputs import check_directory
from zbcompile.cli.shared_options import add_output, positive, words
from zbcompile.formats import profile_json
from zbcompile.formats.fields import MAX_TEXT
from zbcompile.formats.megatron_layout import holdings
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.formats.streams import say
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.devices import device_named
from zbcompile.schedule.spread import spread_words

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = (
        "FACTORY is package.module:function or path.py:function. It is imported and called, and returns "
        "(model, example) or (model, example, loss_fn, target); example is a tuple of args or a dict."
    )
    parser.add_argument("factory", type=words, help="where the model comes from: package.module:function")
    parts = parser.add_mutually_exclusive_group(required=True)
    parts.add_argument("--stages", type=positive, metavar="N", help="number of stages")
    parts.add_argument(
        "--pieces",
        type=positive,
        metavar="N",
        help="at most N small pieces in place of stages, which `zbcompile plan --stages` joins",
    )
    parser.add_argument(
        "--device",
        type=words,
        help="count for this device of the table (such as H100) instead of measuring",
    )
    parser.add_argument(
        "--recompute",
        choices=("none", "auto"),
        default="none",
        help="auto: with variants of each stage, its levels of recompute, to plan with (none)",
    )
    parser.add_argument("--microbatches", type=positive, metavar="M", help="written into the profile")
    add_output(parser, "the profile (standard output)")


def run(arguments: argparse.Namespace) -> int:
    """Cut the model, report what each stage holds, write the profile.

    With a device the model is built without weights where that works, and nothing of it is run.
    """
    check_directory()
    from zbcompile.cli import factory
    from zbcompile.compiler.stages import build_pieces, build_stages
    from zbcompile.compiler.variants import offered_levels
    from zbcompile.passes.profile.counted import counted_profile
    from zbcompile.passes.profile.measure import measure
    from zbcompile.passes.split.rewrites import skipped_from_environment

    device = None if arguments.device is None else device_named(arguments.device)
    build = factory.build if device is None else factory.build_without_weights
    made = build(arguments.factory)
    asked: dict[str, Any] = {
        "target": None if made.loss_fn is None else made.target,
        "loss_fn": made.loss_fn,
        "verify": None if device is None else False,
        "planned_for": device,
        "skip": skipped_from_environment(),
    }
    if arguments.pieces is not None:
        staged = build_pieces(made.model, arguments.pieces, made.args, made.kwargs, **asked)
    else:
        count = arguments.microbatches
        staged = build_stages(
            made.model, arguments.stages, made.args, made.kwargs, num_microbatches=count, **asked
        )
    for report in staged.reports:
        say(report)
    others = offered_levels(staged) if arguments.recompute == "auto" else None
    if device is None:
        inputs = staged.flat_inputs(made.args, made.kwargs, made.target)
        costs = measure(staged.stages, staged.captured.state, inputs, others=others)
    else:
        costs = counted_profile(staged.stages, device, others=others)
    if costs.unsteady:
        say(f"warning: {spread_words(costs.unsteady)}")
    if arguments.pieces is not None:
        costs = _named(costs, holdings([stage.parameters for stage in staged.stages]))
    arguments.output.write(profile_json.dumps(ProfileFile(costs, num_microbatches=arguments.microbatches)))
    return 0


def _named(costs: Profile, names: Sequence[str]) -> Profile:
    """Return the profile with pieces that say what they hold, where a file takes so long a name."""
    pieces = (
        replace(piece, name=name) if 0 < len(name) <= MAX_TEXT else piece
        for piece, name in zip(costs.stages, names, strict=True)
    )
    return replace(costs, stages=tuple(pieces))
