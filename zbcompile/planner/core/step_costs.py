"""What stages cost once a step, as the planner counts it: the rule of `zbcompile.schedule.stage_actions`.

A rank's channel carries the gathers of its stages first, in the order of their first F's, and then the
reductions, in the order of their last W's; its update comes at the end. The kernels, the clock of all send
modes, the exact model and the plain clocks have the rule in them; tests hold them equal to `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbcompile.schedule.problem import Problem
from zbcompile.schedule.stage_actions import update_ns

__all__ = ["StepCosts"]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Times in ns.

    Attributes
    ----------
    gather, reduce
        Per stage, on its rank's channel; 0: there is no such action.
    update
        Per rank.
    """

    gather: tuple[int, ...]
    reduce: tuple[int, ...]
    update: tuple[int, ...]

    @staticmethod
    def of(problem: Problem) -> StepCosts:
        """Collect the costs of a problem."""
        stages = problem.profile.stages
        return StepCosts(
            tuple(stage.unshard_ns for stage in stages),
            tuple(stage.reduce_ns for stage in stages),
            tuple(update_ns(problem, rank) for rank in range(problem.num_ranks)),
        )

    @property
    def any(self) -> bool:
        """Whether there is any."""
        return any(self.gather) or any(self.reduce) or any(self.update)

    def all_in_a_row(self) -> int:
        """Return the time of all of it, one after the other, in ns."""
        return sum(self.gather) + sum(self.reduce) + sum(self.update)

    def lead(self, stages_of: Sequence[Sequence[int]], objective: str) -> int:
        """Return when F(0) of stage 0 may be said to start, where all else waits for it, in ns.

        For the makespan as soon as its parameters are there. For the span, which counts from no common time,
        late enough for any rank to have gathered before.
        """
        if objective == "makespan":
            return self.gather[0]
        return max(sum(self.gather[s] for s in stages) for stages in stages_of)

    def longest_tail(self, stages_of: Sequence[Sequence[int]]) -> int:
        """Return the most time from a rank's last W to its end, in ns."""
        sums = (sum(self.reduce[s] for s in stages) for stages in stages_of)
        return max(tail + update for tail, update in zip(sums, self.update, strict=True))

    def in_ticks(self, unit: int, factor: int) -> StepCosts:
        """Return the costs counted in parts of ``unit`` ns, ``factor`` to each; ``unit`` divides them all."""
        rows = (self.gather, self.reduce, self.update)
        return StepCosts(*(tuple(value // unit * factor for value in row) for row in rows))

    def times(self) -> tuple[int, ...]:
        """Return all times."""
        return (*self.gather, *self.reduce, *self.update)
