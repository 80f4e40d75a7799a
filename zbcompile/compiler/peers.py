"""Processes beside a pipeline with which its stages exchange data (tensor, sequence, expert parallel).

All members of such a group must make the same calls in the same order. So they compile together and run one
plan (``plan_group``), their stages are measured on all of them at the same time, and nothing is planned anew
on one of them alone.
"""

from __future__ import annotations

from zbcompile.errors import UsageError
from zbcompile.passes.collectives import collective_groups, members_of
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.runtime.group import PipelineGroup

__all__ = ["has_peers", "refuse_peers", "require_one_plan"]


def _groups(staged: StagedModel) -> dict[str, int]:
    """Return the groups of more than one process, with the first stage that exchanges data in each."""
    found: dict[str, int] = {}
    for stage in staged.stages:
        graphs = stage.graphs
        for name in collective_groups((graphs.forward, graphs.full_backward)):
            if len(members_of(name)) > 1:
                found.setdefault(name, stage.index)
    return found


def has_peers(staged: StagedModel) -> bool:
    """Return whether a stage exchanges data with other processes while it runs."""
    return bool(_groups(staged))


def require_one_plan(
    staged: StagedModel, pipeline: PipelineGroup | None, planners: PipelineGroup | None
) -> None:
    """Refuse collectives with processes that run another plan, or other stages of the same one.

    Parameters
    ----------
    staged
        The stages.
    pipeline
        The ranks of this pipeline; None if it runs in this process.
    planners
        The processes that run one plan; None if this one plans for itself.

    Raises
    ------
    UsageError
        Names the stage, the members of its group and the processes that run one plan.
    """
    together = set() if planners is None else set(planners.members)
    own = set() if pipeline is None else set(pipeline.members)
    for name, stage in _groups(staged).items():
        members = set(members_of(name))
        if len(members & own) > 1:
            raise UsageError(
                f"stage {stage} has a collective with other ranks of its own pipeline",
                where=f"stage {stage}",
                needed=f"a group with one of the processes {sorted(own)}",
                given=f"a group of the processes {sorted(members)}",
                fix="ranks of a pipeline run different stages at different times; sum after the step",
            )
        if not members <= together:
            raise UsageError(
                f"stage {stage} has a collective with processes that run another plan",
                where=f"stage {stage}",
                needed=f"one plan for the processes {sorted(members)}",
                given=f"one plan for {sorted(together)}" if together else "a plan for this process alone",
                fix="give plan_group= a process group with all of them, and let all compile together",
            )


def refuse_peers(staged: StagedModel, what: str, fix: str) -> None:
    """Refuse what one pipeline would plan alone while its stages exchange data with others.

    Raises
    ------
    UsageError
        Names the first such stage.
    """
    for name, stage in _groups(staged).items():
        raise UsageError(
            f"{what}: stage {stage} has a collective with other processes, which would not run the same plan",
            where=f"stage {stage}",
            given=f"a group of the processes {sorted(members_of(name))}",
            fix=fix,
        )
