"""What else could be run on the same ranks: published orders with several stages per rank, timed alone.

Stages that stand alone on their rank are cut in halves for them, so that the model, the ranks and their caps
stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zbcompile.errors import CheckError, UsageError
from zbcompile.planner.changes import placed
from zbcompile.planner.core.instance import Codes, Instance, to_schedule
from zbcompile.planner.core.score import fits
from zbcompile.planner.core.scorer import fast_value
from zbcompile.planner.starts.classic_loops import interleaved, zb_v
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate

__all__ = ["INTERLEAVED", "ZB_V", "Rival", "rivals"]

INTERLEAVED, ZB_V = "interleaved 1F1B", "ZB-V"


@dataclass(frozen=True, slots=True)
class Rival:
    """A published order on the ranks of a problem.

    Attributes
    ----------
    name
        What it is called.
    halves
        Whether every stage was cut in two equal halves for it.
    problem
        The step that it is an order of: the same costs, links, caps and send mode.
    codes
        The order; None where it does not apply.
    value_ns
        Its span or makespan, as the problem's objective says; None where it does not apply or deadlocks.
    fits
        Whether it stays under the caps.
    why
        Why it does not apply, for people.
    """

    name: str
    halves: bool
    problem: Problem
    codes: Codes | None = None
    value_ns: int | None = None
    fits: bool = False
    why: str = ""

    def schedule(self) -> Schedule | None:
        """Return its order; None where it does not apply."""
        return None if self.codes is None else to_schedule(self.codes, self.problem)


def rivals(problem: Problem) -> list[Rival]:
    """Return interleaved 1F1B (arXiv 2104.04473) and ZB-V (arXiv 2401.10241, section 6) on a problem's ranks.

    Parameters
    ----------
    problem
        The step. With several stages per rank they run as they are, dealt out as each order wants them.
    """
    p, each = problem.num_ranks, problem.num_stages // problem.num_ranks
    per_rank = max(2, each)

    def loops(m: int) -> Codes | None:
        return interleaved(p, per_rank, m, zero_bubble=False)

    def in_v(m: int) -> Codes | None:
        return zb_v(p, m) if per_rank == 2 else None

    return [
        _rival(problem, INTERLEAVED, Placement.looped(p, per_rank), loops, "m is no multiple of the rounds"),
        _rival(problem, ZB_V, Placement.v(p, per_rank), in_v, "it takes two stages per rank"),
    ]


def _rival(
    problem: Problem, name: str, placement: Placement, make: Callable[[int], Codes | None], why_none: str
) -> Rival:
    halves = problem.num_stages == problem.num_ranks
    if problem.num_ranks == 1:
        return Rival(name, halves, problem, why="one rank has no bubble")
    if problem.num_stages % problem.num_ranks:
        return Rival(name, halves, problem, why="its stages do not divide evenly among the ranks")
    if problem.placement != placement:
        try:
            problem = placed(problem, name, placement).problem
        except UsageError as error:
            return Rival(name, halves, problem, why=error.what)
    codes = make(problem.num_microbatches)
    if codes is None:
        return Rival(name, halves, problem, why=why_none)
    value, fitting = _timed(problem, codes)
    if value is None:
        return Rival(name, halves, problem, why=f"it deadlocks with {problem.transport} sends")
    return Rival(name, halves, problem, codes, value, fitting)


def _timed(problem: Problem, codes: Codes) -> tuple[int | None, bool]:
    """Return an order's value, None where it deadlocks, and whether it stays under the caps."""
    if problem.microbatch_costs:
        try:
            timeline = simulate(to_schedule(codes, problem), problem)
        except CheckError:
            return None, False
        held = zip(timeline.peak_bytes, problem.caps, strict=True)
        return timeline.value_ns, all(cap is None or peak <= cap for peak, cap in held)
    free = problem.with_(caps=(None,) * problem.num_ranks)
    return fast_value(free)(codes), fits(Instance.of(problem), codes)
