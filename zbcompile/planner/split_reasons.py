"""Why each rank of an order splits and fuses as it does.

The backwards that a rank splits are fused, those that it fuses are split, all else kept, and the step is
timed: as it is, and with one cause taken away. The cause without which the difference shrinks most decides::

    cause    taken away by                    what it is
    saving   BW as long as B and W            a fused backward overlaps a collective (delta)
    travel   messages that take no time       a gradient that leaves before W travels while W runs
    memory   no caps                          W holds bytes until it runs
    sends    sends that never hold up a rank  a gradient that leaves early makes its rank wait

If none takes away half of it, it is waits of the pipeline that W's fill, or would fill too late.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from zbcompile.errors import UsageError
from zbcompile.planner.core.instance import BW, B, Codes, Instance
from zbcompile.planner.core.score import fits
from zbcompile.planner.core.scorer import fast_value
from zbcompile.planner.improve.row_changes import fuse_range, split_here, split_later
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.semantics import ASYNC

__all__ = ["MOST_EXPLAINED", "Cause", "Choice", "RankReason", "check_explainable", "rank_reasons"]

MOST_EXPLAINED = 500_000
"""Most actions times ranks: every rank times the whole step about ten times."""


class Cause(enum.Enum):
    """What decides that backwards are split, or fused.

    A ``tie``: the step is as long either way. ``missed``: the other way is shorter, and was not found.
    """

    SAVING = "saving"
    TRAVEL = "travel"
    MEMORY = "memory"
    SENDS = "sends"
    WAITS = "waits"
    TIE = "tie"
    MISSED = "missed"


@dataclass(frozen=True, slots=True)
class Choice:
    """Some backwards of a rank, and what the other way to run them would do to the step.

    Attributes
    ----------
    count
        How many they are.
    change_ns
        By how much the step would be longer; without caps where the other way does not fit. None: it hangs.
    fits
        Whether the other way fits under the caps.
    cause
        What decides.
    """

    count: int
    change_ns: int | None
    fits: bool
    cause: Cause


@dataclass(frozen=True, slots=True)
class RankReason:
    """How a rank runs its backwards, and why.

    Attributes
    ----------
    rank
        Which.
    split, fused
        Those that it splits, those that it fuses; None where there are none.
    saving_ns
        What fusing a microbatch saves on all stages of the rank (`saving_ns`).
    travel_ns
        Longest travel time of a gradient that it sends to another rank; None if it sends none.
    """

    rank: int
    split: Choice | None
    fused: Choice | None
    saving_ns: int
    travel_ns: int | None


def check_explainable(problem: Problem) -> None:
    """Refuse a step with too many actions and ranks.

    Raises
    ------
    UsageError
        Says how many there are.
    """
    size = 3 * problem.num_stages * problem.num_microbatches * problem.num_ranks
    if size > MOST_EXPLAINED:
        raise UsageError(
            "the step is too large to say why for every rank",
            needed=f"at most {MOST_EXPLAINED} actions times ranks",
            given=size,
            fix="give one transport, or fewer microbatches",
        )


def rank_reasons(codes: Codes, problem: Problem) -> tuple[RankReason, ...]:
    """Return, for every rank of an order that fits, why it splits and fuses as it does.

    Parameters
    ----------
    codes
        The order.
    problem
        The step; its stages offer no variants.
    """
    clocks = _Clocks(problem)
    return tuple(_reason(codes, rank, problem, clocks) for rank in range(problem.num_ranks))


def saving_ns(cost: StageCost, profile: Profile) -> int:
    """Return what one call of BW saves against those of B and W, in ns: host overhead is per call."""
    split = cost.backward_input_ns + cost.backward_weight_ns + profile.overhead_ns
    return split - cost.full_backward_ns


class _Clocks:
    """Times orders of a problem: as it is, and with one cause taken away."""

    def __init__(self, problem: Problem) -> None:
        self.instance = Instance.of(problem)
        profile = problem.profile
        no_saving = tuple(
            replace(stage, full_backward_ns=stage.full_backward_ns + saving_ns(stage, profile))
            for stage in profile.stages
        )
        changed = {
            Cause.SAVING: problem.with_(profile=replace(profile, stages=no_saving)),
            Cause.TRAVEL: problem.with_(profile=replace(profile, link=Link(), links=())),
        }
        if problem.sends.holds_rank:
            changed[Cause.SENDS] = problem.with_(transport=ASYNC.name)
        self.value = fast_value(problem)
        self.without = {cause: fast_value(other) for cause, other in changed.items()}

    def fits(self, codes: Codes) -> bool:
        """Return whether an order fits under the caps."""
        return fits(self.instance, codes)


def _reason(codes: Codes, rank: int, problem: Problem, clocks: _Clocks) -> RankReason:
    stages = problem.placement.stages_of(rank)
    row, m = codes[rank], problem.num_microbatches
    splits, fused = (sum(kind == wanted for kind, _ in row) for wanted in (B, BW))
    other_fused, here, later = row, row, row
    for stage in stages:
        other_fused = fuse_range(other_fused, stage, 0, m)
        here, later = split_here(here, stage, 0, m), split_later(later, stage, 0, m)
    costs = [problem.profile.stages[s] for s in stages]
    return RankReason(
        rank,
        _choice(codes, rank, splits, (other_fused,), clocks) if splits else None,
        _choice(codes, rank, fused, (here, later), clocks) if fused else None,
        sum(saving_ns(cost, problem.profile) for cost in costs),
        _travel(problem, rank),
    )


def _travel(problem: Problem, rank: int) -> int | None:
    rank_of = problem.placement.rank_of
    sent = [
        problem.lag_ns(edge, backward=True)
        for edge in problem.profile.edges
        if edge.has_gradient and rank_of[edge.target] == rank != rank_of[edge.source]
    ]
    return max(sent, default=None)


def _choice(
    codes: Codes, rank: int, count: int, others: tuple[list[tuple[int, int]], ...], clocks: _Clocks
) -> Choice:
    """Return what it would change to run some backwards of a rank in the best of other ways."""
    orders = [[*codes[:rank], row, *codes[rank + 1 :]] for row in others]
    fitting = [order for order in orders if clocks.fits(order)]

    def change(value: Callable[[Codes], int | None], among: list[Codes]) -> int | None:
        found = [v for order in among if (v := value(order)) is not None]
        own = value(codes)
        return min(found) - own if found and own is not None else None

    among = fitting or orders
    now = change(clocks.value, among)
    if now is None:  # under this send mode the other way hangs where it stands
        return Choice(count, None, bool(fitting), Cause.SENDS)
    if now <= 0:
        none = Cause.TIE if now == 0 else Cause.MISSED
        return Choice(count, now, bool(fitting), none if fitting or now == 0 else Cause.MEMORY)
    left = {cause: change(value, among) for cause, value in clocks.without.items()}
    enough = {cause: ns for cause, ns in left.items() if ns is not None and 2 * ns <= now}
    return Choice(count, now, bool(fitting), min(enough, key=lambda c: enough[c], default=Cause.WAITS))
