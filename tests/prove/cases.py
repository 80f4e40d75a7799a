"""Random small problems for the last-round-trip bound, and what the exact model says of each."""

from __future__ import annotations

import enum
import random
from dataclasses import replace

from zbcompile.planner.bounds.analytic import analytic_bounds
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.certify.derive import derivations
from zbcompile.planner.certify.facts import Derivation, Facts
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.exact.model import refute
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.problem import TRANSPORTS, Problem

__all__ = ["Verdict", "judge", "make_problem", "with_send_mode"]

METHOD = "last_round_trip"
LONGEST_ACTIONS = 110
"""Most F's, B's and W's of a step: the solver closes nearly all of these in seconds."""


class Verdict(enum.Enum):
    """What became of a problem's bound."""

    NONE = "the bound says nothing"
    BELOW = "no more than the other bounds"
    HELD = "held"
    UNDECIDED = "undecided"
    VIOLATED = "VIOLATED"


def make_problem(seed: int, most_actions: int = LONGEST_ACTIONS) -> Problem:
    """Return a problem of two or three ranks with one to three stages each.

    V, looped or any map; a chain or branches, with and without gradients; equal and unequal stages, times and
    bytes of zero among them, BW cheaper than B and W; caps from the least that works; 1 to 6 microbatches.
    """
    rng = random.Random(seed)
    placement = _placement(rng)
    count = placement.num_stages
    most = max(1, min(6, most_actions // (3 * count)))
    stages = _stages(rng, count)
    profile = Profile(stages, _edges(rng, count), Link(rng.choice((0, 0, 1, 2, 5))))
    objective = rng.choice(("span", "makespan"))
    problem = Problem.of(profile, placement, rng.randint(1, most), None, objective)
    caps = []
    for rank in range(problem.num_ranks):
        least = least_headroom(problem, rank)
        loose = int(least * rng.uniform(1, 2.5)) + rng.randint(0, 2)
        caps.append(rng.choice((least, loose, loose, loose, None)))
    return problem.with_(caps=tuple(caps))


def with_send_mode(seed: int) -> Problem:
    """Return a problem of at most 60 actions under any send mode; half have gradients that wait."""
    problem, rng = make_problem(seed, most_actions=60), random.Random(seed)
    problem = problem.with_(transport=rng.choice(TRANSPORTS))
    if rng.random() < 0.5:
        return problem
    stages = tuple(replace(stage, gradient_bytes=rng.randint(1, 8)) for stage in problem.profile.stages)
    return problem.with_(profile=replace(problem.profile, stages=stages))


def _placement(rng: random.Random) -> Placement:
    """Return a placement: half of them V's, where the bound says most."""
    ranks = rng.randint(2, 3)
    kind = rng.choice(("v", "v", "v", "looped", "map", "map"))
    if kind == "v":
        return Placement.v(ranks)
    if kind == "looped":
        return Placement.looped(ranks, rng.choice((2, 2, 3)))
    per_rank = [rank for rank in range(ranks) for _ in range(rng.randint(1, 3))]
    rng.shuffle(per_rank)
    return Placement(tuple(per_rank))


def _stages(rng: random.Random, count: int) -> tuple[StageCost, ...]:
    """Return stages: all alike, or each of its own; some times and bytes are zero."""
    longest = rng.choice((3, 6, 10))
    zeros = rng.choice((0.0, 0.0, 0.1, 0.4))

    def some(low: int, high: int) -> int:
        return 0 if rng.random() < zeros else rng.randint(low, high)

    def stage() -> StageCost:
        saved = some(1, 6)
        pending = some(1, max(1, saved + rng.choice((0, 0, 1))))
        b, w = some(1, longest), some(0, longest)
        return StageCost(some(1, longest), b, w, max(0, b + w - rng.choice((0, 0, 0, 1, 3))), saved, pending)

    if rng.random() < 0.4:
        return (stage(),) * count
    return tuple(stage() for _ in range(count))


def _edges(rng: random.Random, count: int) -> tuple[Edge, ...]:
    """Return a chain, or any edges: some stages skipped, some without gradient."""
    chain = tuple(Edge(s, s + 1) for s in range(count - 1))
    if rng.random() < 0.6:
        return chain
    if rng.random() < 0.5:
        skips = [(a, b) for a in range(count) for b in range(a + 2, count) if rng.random() < 0.2]
        return (*chain, *(Edge(a, b, has_gradient=rng.random() < 0.8) for a, b in skips))
    return tuple(
        Edge(a, b, has_gradient=rng.random() < 0.8)
        for a in range(count)
        for b in range(a + 1, count)
        if rng.random() < (0.8 if b == a + 1 else 0.15)
    )


def judge(
    problem: Problem, *, time_limit_s: float = 5.0, every: bool = False
) -> tuple[Verdict, Bound | None]:
    """Derive the problem's bound again and ask the exact model for an order below it.

    Parameters
    ----------
    problem
        The problem.
    time_limit_s
        Seconds for the solver.
    every
        Whether a bound that is no more than the others is asked about too.
    """
    bounds = analytic_bounds(problem)
    mine = [bound for bound in bounds if bound.method == METHOD]
    if not mine:
        return Verdict.NONE, None
    for bound in mine:
        out = Derivation()
        derivations(problem.objective)[METHOD](Facts(problem), bound.witness, out)
        out.compare(bound.witness)
        assert out.total == bound.value_ns, (problem, bound, out)
    best = mine[0]
    others = [bound.value_ns for bound in bounds if bound.method != METHOD]
    if best.value_ns <= max(others) and not every:
        return Verdict.BELOW, best
    answer = refute(Instance.of(problem).relaxed(), best.value_ns, time_limit_s=time_limit_s)
    verdicts = {True: Verdict.HELD, False: Verdict.VIOLATED, None: Verdict.UNDECIDED}
    return verdicts[answer], best
