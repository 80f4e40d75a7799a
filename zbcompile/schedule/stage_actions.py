"""The actions of a stage as a whole: where they stand in an order, and what they take of the step.

An order that is planned says in which sequence each rank runs its F's, B's and W's. What belongs to a stage
and to no microbatch follows from it::

    0F0 0F1 0B0 0W0 0B1 0W1   -->   0UNSHARD 0F0 0F1 0B0 0W0 0B1 0W1 0REDUCE_GRAD 0RESHARD

* UNSHARD gathers the parameters of a sharded stage. All stand at the head of their rank's row, in the order
  in which the stages run their first F, so that gathering begins with the step.
* REDUCE_GRAD reduces the gradients of a stage over its replicas. It stands right after the last W or BW.
* RESHARD lets the gathered parameters go. It stands behind the last backward work, and here behind
  REDUCE_GRAD; an order that is given may have these two the other way round, as torch's have.

The clock, stated once (`zbcompile.schedule.event_graph` does it for any order,
`zbcompile.planner.core.step_costs` for the planner):

1. A rank has one channel for these actions. It carries one at a time, in the order of the row, from the
   moment when the rank comes to the action. The rank itself goes on. No link between ranks is used.
2. UNSHARD of a stage takes `StageCost.unshard_ns`, and the stage's first F waits for its end.
3. REDUCE_GRAD of a stage takes `StageCost.reduce_ns`. RESHARD takes no time and needs no channel.
4. When a rank's last W and its last reduction have ended, the optimizer's step holds the rank for the sum of
   its stages' `StageCost.update_ns`. There is no message in it: every rank updates by itself.
5. None of it holds bytes of its own: `StageCost.static_bytes` has to count gathered parameters.
6. A rank ends with its update. Its span begins with its first F or, if that is sooner, with its first
   UNSHARD, each as late as the ends of all ranks allow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from zbcompile.errors import UsageError
from zbcompile.schedule.held_gradients import MAKES_GRADIENTS
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.problem import Problem

__all__ = ["channel_ns", "has_step_costs", "update_ns", "with_stage_actions", "with_those_of"]


def has_step_costs(problem: Problem) -> bool:
    """Return whether any stage costs anything once a step: a gather, a reduction or an update."""
    return any(stage.has_step_costs for stage in problem.profile.stages)


def channel_ns(action: Action, problem: Problem) -> int:
    """Return how long an action of a stage as a whole occupies its rank's channel, in ns."""
    cost = problem.profile.stages[action.stage]
    if action.kind is Kind.UNSHARD:
        return cost.unshard_ns
    return cost.reduce_ns if action.kind is Kind.REDUCE_GRAD else 0


def update_ns(problem: Problem, rank: int) -> int:
    """Return how long the optimizer's step holds a rank, in ns."""
    return sum(problem.profile.stages[s].update_ns for s in problem.placement.stages_of(rank))


def with_stage_actions(
    schedule: Schedule,
    problem: Problem,
    *,
    sharded_stages: Collection[int] = (),
    reduced_stages: Collection[int] = (),
) -> Schedule:
    """Put the actions of stages as a whole into an order, where they are not in it already.

    A stage gets UNSHARD and RESHARD where its cost says so (``unshard_ns``), and REDUCE_GRAD likewise
    (``reduce_ns``).

    Parameters
    ----------
    sharded_stages
        Stages that get UNSHARD and RESHARD whatever their cost says.
    reduced_stages
        Stages that get REDUCE_GRAD whatever their cost says.

    Returns
    -------
    Schedule
        The order with them; the same object where there is nothing to put in.

    Raises
    ------
    UsageError
        A stage is named that the problem does not have.
    """
    for stage in (*sharded_stages, *reduced_stages):
        if not 0 <= stage < problem.num_stages:
            raise UsageError(
                "a stage that is not there cannot be sharded or reduced",
                needed=f"stages 0 to {problem.num_stages - 1}",
                given=stage,
            )
    costs = problem.profile.stages
    sharded = {s for s, cost in enumerate(costs) if cost.unshard_ns or s in sharded_stages}
    reduced = {s for s, cost in enumerate(costs) if cost.reduce_ns or s in reduced_stages}
    if not sharded and not reduced:
        return schedule
    order = [_completed(row, sharded, reduced) for row in schedule.order]
    if all(len(row) == len(old) for row, old in zip(order, schedule.order, strict=True)):
        return schedule
    return Schedule.of(schedule.placement, schedule.num_microbatches, order)


def _completed(row: Sequence[Action], sharded: Collection[int], reduced: Collection[int]) -> list[Action]:
    """Return a rank's row with what it lacks."""
    there = {(action.kind, action.stage) for action in row if action.kind.is_of_stage}
    last = {action.stage: k for k, action in enumerate(row) if action.kind in MAKES_GRADIENTS}
    forwards = dict.fromkeys(action.stage for action in row if action.kind is Kind.FORWARD)
    wanted = [s for s in forwards if s in sharded and (Kind.UNSHARD, s) not in there]
    result = [Action(Kind.UNSHARD, s, 0) for s in wanted]
    for k, action in enumerate(row):
        result.append(action)
        stage = action.stage
        if last.get(stage) != k:
            continue
        for kind, stages in ((Kind.REDUCE_GRAD, reduced), (Kind.RESHARD, sharded)):
            if stage in stages and (kind, stage) not in there:
                result.append(Action(kind, stage, 0))
    return result


def with_those_of(schedule: Schedule, other: Schedule) -> Schedule:
    """Put the actions of stages as a whole that another order has into this one, which has none.

    Each stands behind the compute action that it stands behind there, or at the head of its row.
    """
    if not other.has_stage_actions:
        return schedule
    order = [_taken_over(row, old) for row, old in zip(schedule.order, other.order, strict=True)]
    return Schedule.of(schedule.placement, schedule.num_microbatches, order)


def _taken_over(row: Iterable[Action], other: Iterable[Action]) -> list[Action]:
    behind: dict[Action | None, list[Action]] = {}
    anchor: Action | None = None
    for action in other:
        if action.kind.is_of_stage:
            behind.setdefault(anchor, []).append(action)
        elif action.kind.is_compute:
            anchor = action
    result = list(behind.get(None, ()))
    for action in row:
        result += [action, *behind.get(action, ())]
    return result
