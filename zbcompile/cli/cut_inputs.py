"""Reads the problem of `plan --stages`: pieces, and the stages to cut them into."""

from __future__ import annotations

import argparse

from zbcompile.cli.inputs import costs_of, costs_where, parse_bytes, parse_placement, parse_speeds
from zbcompile.errors import UsageError
from zbcompile.schedule.cuts import CutProblem
from zbcompile.schedule.ir import PLACEMENTS, Placement
from zbcompile.schedule.limits import check_pieces, check_plannable
from zbcompile.schedule.problem import ACCUMULATE, OBJECTIVES, TRANSPORTS

__all__ = ["load_cut_problems"]


def load_cut_problems(arguments: argparse.Namespace) -> list[CutProblem]:
    """Return the problems of `plan --stages`, one for every placement that is asked for.

    The profile's stages are the pieces. Options win over what its file says.

    Raises
    ------
    UsageError
        The file is broken, or the options do not fit it.
    """
    if arguments.recompute is not None:
        raise UsageError("--recompute is not chosen with the cuts", fix="leave it or --stages out")
    file = costs_of(arguments)
    if arguments.microbatch_costs is not None or file.microbatch_costs:
        raise UsageError(
            "cuts are chosen for microbatches that are alike",
            where="--microbatch-costs" if arguments.microbatch_costs else costs_where(arguments),
            fix="leave the costs of microbatches out, or --stages",
        )
    placements = _placements(arguments)
    ranks = placements[0].num_ranks
    if file.placement is not None and arguments.placement is None and arguments.ranks is None:
        raise UsageError(
            "the file's placement is one of pieces, not of stages",
            where=costs_where(arguments),
            fix="give --placement or --ranks beside --stages",
        )
    caps = file.caps if arguments.cap is None else _caps(arguments.cap)
    if len(caps) not in (0, 1, ranks):
        raise UsageError("one cap for all ranks, or one per rank", needed=ranks, given=len(caps))
    limits = caps * ranks if len(caps) == 1 else caps
    check_pieces(file.profile, costs_where(arguments))
    kept = arguments.kept_gradients
    tasks = [
        CutProblem.of(
            file.profile,
            placement,
            arguments.microbatches or file.num_microbatches or 2 * ranks,
            limits,
            arguments.objective or file.objective or OBJECTIVES[0],
            arguments.transport or file.transport or TRANSPORTS[0],
            parse_speeds(arguments.rank_speeds, ranks),
            accumulate=arguments.accumulate or file.accumulate or ACCUMULATE[0],
            kept_gradients=bool(file.kept_gradients if kept is None else kept),
        )
        for placement in placements
    ]
    for task in tasks:
        check_plannable(task.frame, costs_where(arguments))
    return tasks


def _placements(arguments: argparse.Namespace) -> list[Placement]:
    """Return the placements to cut for: the one of ``--placement``, or those that the ranks allow."""
    stages, text = arguments.stages, arguments.placement
    ranks = arguments.ranks or (stages if text in (None, "auto") else None)
    if ranks is not None and stages % ranks:
        raise UsageError(
            f"{stages} stages do not divide evenly among {ranks} ranks",
            needed="a multiple of the ranks",
            given=stages,
        )
    if text not in (None, "auto"):
        named = ranks is not None and text in PLACEMENTS
        placement = parse_placement(f"{text}:{stages // ranks}" if named and ranks else text, stages)
        if ranks is not None and placement.num_ranks != ranks:
            raise UsageError(
                "--placement and --ranks differ", needed=f"{ranks} ranks", given=placement.num_ranks
            )
        return [placement]
    assert ranks is not None
    if stages == ranks:
        return [Placement.linear(ranks)]
    return [Placement.v(ranks, stages // ranks), Placement.looped(ranks, stages // ranks)]


def _caps(text: str) -> tuple[int | None, ...]:
    """Read the caps of ``--cap`` in bytes; ``1.5p`` has no meaning before the cut."""
    words = [word.strip() for word in text.split(",")]
    if any(word.lower().endswith("p") for word in words):
        raise UsageError(
            "what p microbatches hold on a rank depends on the cut",
            given=text[:40],
            fix="give --cap in bytes",
        )
    return tuple(None if word.lower() == "none" else parse_bytes(word) for word in words)
