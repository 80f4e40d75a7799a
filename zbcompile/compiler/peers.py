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

__all__ = [
    "has_peers",
    "outside_peers",
    "reduced_stages",
    "refuse_changed_buffers",
    "refuse_peers",
    "refuse_trials",
    "require_one_plan",
    "require_own_groups",
    "sharded_stages",
]


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
    own = set() if pipeline is None else {pipeline.members[rank] for rank in pipeline.pipeline}
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


def require_own_groups(staged: StagedModel, group: PipelineGroup | None) -> None:
    """Refuse a dimension of the mesh along which no stage exchanges data: what would it be for?

    Raises
    ------
    UsageError
        Names the dimension.
    """
    used = [set(members_of(name)) for name in _groups(staged)]
    for name, ranks in () if group is None else group.others:
        if len(ranks) > 1 and set(ranks) not in used:
            raise UsageError(
                f"no stage exchanges data along the mesh's dimension {name!r}",
                where="mesh",
                given=f"{list(ranks)} along {name}",
                fix=f"call replicas dp and ranks of a pipeline pp, or use mesh[{name!r}].get_group() in it",
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


def refuse_trials(staged: StagedModel) -> None:
    """Refuse steps on trial (``post_validation``) where stages exchange data while they run.

    A rank that knows that a step is void runs no stage any more; a peer that does not know it yet would wait.

    Raises
    ------
    UsageError
        Names the first such stage.
    """
    for name, stage in _groups(staged).items():
        raise UsageError(
            "post_validation leaves out the rest of a step that is undone, and peers might wait for the "
            f"collective of stage {stage} in it",
            where=f"stage {stage}",
            given=f"a group of the processes {sorted(members_of(name))}",
            fix="compile without post_validation, or without collectives in stages (tp)",
        )


def refuse_changed_buffers(group: PipelineGroup | None, staged: StagedModel) -> None:
    """Refuse stages that change a buffer, where there are replicas: each would change its own.

    Raises
    ------
    UsageError
        Names the stage and the buffer.
    """
    if group is None or len(group.replicas) == 1:
        return
    for stage in staged.stages:
        for name in stage.mutated:
            raise UsageError(
                f"stage {stage.index} changes a buffer in every forward, and each replica would change it by "
                "its own rows",
                where=name,
                fix="freeze it (evaluation mode of its module), or use a norm without running statistics",
            )


def reduced_stages(staged: StagedModel, group: PipelineGroup | None) -> tuple[int, ...]:
    """Return the stages whose gradients are summed over replicas: none where there are none."""
    if group is None or len(group.replicas) == 1:
        return ()
    return tuple(stage.index for stage in staged.stages if stage.trainable)


def sharded_stages(staged: StagedModel, group: PipelineGroup | None) -> tuple[int, ...]:
    """Return the stages whose weights replicas share: none where each replica has all."""
    if group is None or len(group.shards) == 1:
        return ()
    return tuple(stage.index for stage in staged.stages if stage.parameters)


def outside_peers(staged: StagedModel, group: PipelineGroup | None) -> str:
    """Return in words the processes beside the group that stages exchange data with; "" if there are none."""
    own = set() if group is None else set(group.members)
    found = {name: members_of(name) for name in _groups(staged)}
    return next(
        (
            f"stage {_groups(staged)[name]} exchanges data with the processes {sorted(members)}, of which "
            "mesh= does not tell"
            for name, members in found.items()
            if not set(members) <= own
        ),
        "",
    )
