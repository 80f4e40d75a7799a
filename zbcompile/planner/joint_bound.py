"""A bound over all assignments of variants to stages, and over all orders of each.

On one rank each of its own levels is looked at, every other stage at the least of each of its costs: the
least of these bounds holds for every assignment. The best rank's bound is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from zbcompile.planner.assignments import Assignment, bound_of
from zbcompile.planner.bounds.bound import Bound
from zbcompile.schedule.costs import StageCost
from zbcompile.schedule.problem import Problem

__all__ = ["bounds_in", "cheapest", "joint_bound", "offers_variants"]

_MOST_LEVELS = 64
"""Combinations of levels on one rank up to which its bound looks at each of them."""

_STAGES_PER_SECOND = 2000
"""Stages whose bounds take a second; less than half as many where two bounds are looked at."""

_MOMENT_S, _SHARE = 0.3, 0.15
"""Seconds for the bound, and its share of the time limit beside them."""


def offers_variants(problem: Problem) -> bool:
    """Return whether any stage has more than one way to run."""
    return any(stage.variants for stage in problem.profile.stages)


def cheapest(stage: StageCost) -> StageCost:
    """Return a stage that costs no more than any of its variants, in every time and in bytes.

    Valid in bounds: whatever runs with a variant runs with this one in its place, no later and with no more
    memory. A split B and W take at least the least B and W, a fused BW at least the least BW.

    Notes
    -----
    `zbcompile.planner.certify.certificate` computes the same from a witness, in code of its own: a fault here
    must not vouch for itself there.
    """
    return StageCost.combined((stage, *stage.variants), min).of_stage(stage)


def bounds_in(problem: Problem, time_limit_s: float) -> int:
    """Return how many bounds of assignments a joint bound may look at under a time limit."""
    slower = 2.5 if problem.sends.travel_is_work or problem.microbatch_costs else 1.0
    seconds = _MOMENT_S + _SHARE * time_limit_s
    return max(1, int(seconds * _STAGES_PER_SECOND / (slower * problem.num_stages)))


def joint_bound(problem: Problem, most: int | None = None) -> Bound:
    """Return a bound for every order under every assignment.

    Without variants it is the problem's own analytic bound.

    Parameters
    ----------
    problem
        The problem.
    most
        Most assignments that are bounded. All stages at their cheapest come first; then ranks are looked at
        as long as they last, from both ends and the middle on. None: all that can raise the bound.
    """
    if not offers_variants(problem):
        return bound_of(problem)
    levels = _Levels(problem, most)
    value, choice = levels.bound(0, None)
    found, rank = [(value, choice)], 0
    for other in _from_outside(problem.num_ranks):
        better = levels.all_above(other, found)
        if better is not None:
            found, rank = better, other
    return Bound(
        min(b.value_ns for b, _ in found), "variants", problem.objective, _witness(problem, rank, found)
    )


def _from_outside(ranks: int) -> Iterator[int]:
    """Yield the first, the last and the middle rank, then all others."""
    ends = dict.fromkeys((0, ranks - 1, ranks // 2))
    yield from ends
    yield from (rank for rank in range(ranks) if rank not in ends)


_Found = list[tuple[Bound, Assignment | None]]
"""Bounds of one rank and the levels of its stages; None: any."""


class _Levels:
    """Bounds with one rank's stages at given levels and all others at their cheapest, so many at most."""

    def __init__(self, problem: Problem, most: int | None) -> None:
        self.problem, self.left = problem, most
        self.low = tuple(cheapest(stage) for stage in problem.profile.stages)
        self.known: dict[tuple[StageCost, ...], Bound] = {}
        self.least: Assignment | None = None
        """The levels that had the least bound on the rank looked at last."""

    def bound(self, rank: int, choice: Assignment | None) -> tuple[Bound, Assignment | None]:
        """Return the bound of a choice of levels for a rank's stages."""
        costs = list(self.low)
        if choice is not None:
            for s, level in zip(self.problem.placement.stages_of(rank), choice, strict=True):
                costs[s] = _level(self.problem.profile.stages[s], level)
        key = tuple(costs)
        if key not in self.known:
            profile = replace(self.problem.profile, stages=key)
            self.known[key] = bound_of(self.problem.with_(profile=profile))
            self.left = None if self.left is None else self.left - 1
        return self.known[key], choice

    def all_above(self, rank: int, best: _Found) -> _Found | None:
        """Return the bounds of all levels of a rank; None if one is no better than the least of ``best``.

        Also where there are too many levels, or no bound is left.
        """
        value = min(bound.value_ns for bound, _ in best)
        stages = [self.problem.profile.stages[s] for s in self.problem.placement.stages_of(rank)]
        choices = list(itertools.islice(self._choices(stages), _MOST_LEVELS + 1))
        if len(choices) > _MOST_LEVELS:
            return None
        found: _Found = []
        for choice in choices:
            if self.left is not None and self.left <= 0:
                return None
            found.append(self.bound(rank, choice))
            if found[-1][0].value_ns <= value:
                self.least = choice
                return None
        self.least = min(found, key=lambda entry: entry[0].value_ns)[1]
        return sorted(found, key=lambda entry: entry[1] or ())

    def _choices(self, stages: list[StageCost]) -> Iterator[Assignment]:
        """Yield all levels of a rank's stages, those that were least elsewhere first."""
        levels = [range(len(stage.variants) + 1) for stage in stages]
        first = self.least
        if (
            first is not None
            and len(first) == len(levels)
            and all(k in r for k, r in zip(first, levels, strict=True))
        ):
            yield first
        yield from (choice for choice in itertools.product(*levels) if choice != first)


def _witness(problem: Problem, rank: int, found: _Found) -> dict[str, object]:
    """Return what proves that no assignment and no order is below the least of some bounds."""
    return {
        "rank": rank,
        "levels": [
            {
                "choice": None if choice is None else list(choice),
                "bound_ns": bound.value_ns,
                "method": bound.method,
                "witness": dict(bound.witness),
            }
            for bound, choice in found
        ],
        "costs": [[_numbers(way) for way in (stage, *stage.variants)] for stage in problem.profile.stages],
    }


def _level(stage: StageCost, level: int) -> StageCost:
    """Return a stage as one of its variants (0: as it is)."""
    chosen = stage if level == 0 else stage.variants[level - 1]
    return chosen.of_stage(stage)


def _numbers(way: StageCost) -> list[int]:
    """Return the costs of a way to run as a witness lists them."""
    return [
        way.forward_ns,
        way.backward_input_ns,
        way.backward_weight_ns,
        way.full_backward_ns,
        way.saved_bytes,
        way.saved_for_weight_bytes,
    ]
