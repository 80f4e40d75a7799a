"""Recompute chosen with the order: stages at several levels in the profile, and the ones that a plan chose.

A level is named in the name of the stage's cost (``stage 2, recompute=full``). So a plan says by itself what
its stages recompute: on other ranks, in a plan cache, in a schedule file, in a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from zbcompile.errors import InfeasibleError, UsageError
from zbcompile.passes.split.recompute import Recompute, level_in
from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.schedule.least_memory import check_caps
from zbcompile.schedule.memory import uses_of
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution

__all__ = ["as_planned", "chosen_levels", "memory_may_bind", "offered_levels", "way_of_recompute"]


def offered_levels(staged: StagedModel) -> list[list[StageGraphs]]:
    """Return per stage what it may run as beside what it is: its levels that no other one beats."""
    assert staged.traced is not None
    levels = staged.traced.worthwhile()
    deepest = max(map(len, levels))
    rows = [staged.stages_at([row[min(k, len(row) - 1)] for row in levels]) for k in range(1, deepest)]
    return [[rows[k - 1][s] for k in range(1, len(row))] for s, row in enumerate(levels)]


def chosen_levels(solution: Solution) -> list[Recompute | None]:
    """Return per stage the level that a plan chose for it; None: it runs as it is.

    Raises
    ------
    UsageError
        The plan chose a variant of a stage that is no level of recompute.
    """
    levels: list[Recompute | None] = [None] * solution.problem.num_stages
    for s, k in enumerate(solution.variants):
        if not k:
            continue
        name = solution.problem.profile.stages[s].name
        levels[s] = level_in(name)
        if levels[s] is None:
            raise UsageError(
                f"the plan runs stage {s} as its variant {k}{f' ({name})' if name else ''}, "
                "which compile() does not build",
                where="profile.stages[...].variants",
                needed='variants whose names end in "recompute=min_memory", "recompute=full" or a price',
                given=f"variants {list(solution.variants)}",
                fix="give such names to variants that are levels of recompute, or a profile without variants",
            )
    return levels


def as_planned(staged: StagedModel, solution: Solution) -> StagedModel:
    """Return the stages at the levels that the plan chose, for good.

    Raises
    ------
    UsageError
        As `chosen_levels`.
    """
    chosen = chosen_levels(solution)
    levels = [built if level is None else level for level, built in zip(chosen, staged.levels, strict=True)]
    return staged.settled(None if tuple(levels) == staged.levels else levels)


def memory_may_bind(problem: Problem) -> bool:
    """Return whether a cap might ever be reached: whether recompute can change anything."""
    return any(
        cap is not None
        and problem.static_bytes(rank)
        + problem.num_microbatches
        * sum(uses_of(problem.profile.stages[s]).all_taken for s in problem.placement.stages_of(rank))
        > cap
        for rank, cap in enumerate(problem.caps)
    )


def way_of_recompute(problem: Problem, staged: StagedModel) -> list[str]:
    """Return whether ``recompute="auto"`` is a way out of a cap that is too low for the stages as they are.

    Returns
    -------
    list
        A few words with the least cap that it needs; nothing where it needs as much, or where that is not
        known, because the stages cannot be split again.
    """
    if staged.traced is None:
        return []
    least = staged.traced.split(["full"] * problem.num_stages)
    ways = [
        (
            cost,
            replace(cost, saved_bytes=lean.saved_bytes, saved_for_weight_bytes=lean.saved_for_weight_bytes),
        )
        for cost, lean in zip(problem.profile.stages, least, strict=True)
    ]
    stages = tuple(min(pair, key=lambda way: uses_of(way).alone(fusing=True)) for pair in ways)
    if stages == problem.profile.stages:
        return []
    try:
        check_caps(problem.with_(profile=replace(problem.profile, stages=stages)))
    except InfeasibleError as error:
        return [f'recompute="auto" with {error.needed} bytes on {error.where}']
    return ['recompute="auto", which fits']
