"""Random problems and random legal orders for the property tests."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import ACCUMULATE, OBJECTIVES, Problem
from zbcompile.schedule.rules import Rules, predecessors

_TIME = st.integers(0, 9)
_BYTES = st.integers(0, 9)


@st.composite
def stage_costs(draw: st.DrawFn) -> StageCost:
    """Draw any costs with B + W at least BW."""
    b, w = draw(_TIME), draw(_TIME)
    return StageCost(
        draw(_TIME),
        b,
        w,
        draw(st.integers(0, b + w)),
        draw(_BYTES),
        draw(_BYTES),
        draw(st.integers(0, 3)),
        gradient_bytes=draw(st.sampled_from([0, 0, 1, 2, 5])),
    )


@st.composite
def placements(draw: st.DrawFn, max_ranks: int = 4) -> Placement:
    """Draw a linear, looped, V or other placement."""
    ranks = draw(st.integers(1, max_ranks))
    kind = draw(st.sampled_from(["linear", "looped", "v", "map"]))
    if kind == "linear":
        return Placement.linear(ranks)
    if kind == "map":
        extra = draw(st.lists(st.integers(0, ranks - 1), max_size=3))
        return Placement(tuple(draw(st.permutations([*range(ranks), *extra]))))
    return Placement.named(kind, ranks, draw(st.integers(1, 3)))


@st.composite
def problems(draw: st.DrawFn, max_ranks: int = 4, max_microbatches: int = 4) -> Problem:
    """Draw problems with unequal stages, skip connections, edges without gradients, and costly links."""
    placement = draw(placements(max_ranks))
    n = placement.num_stages
    edges = [Edge(s, s + 1, draw(_BYTES), draw(_BYTES), True) for s in range(n - 1)]
    if n > 2:
        pairs = draw(st.lists(st.tuples(st.integers(0, n - 3), st.integers(2, n - 1)), max_size=2))
        for source, gap in sorted(set(pairs)):
            if source + 2 <= gap:
                edges.append(Edge(source, gap, draw(_BYTES), draw(_BYTES), draw(st.booleans())))
    link = Link(draw(st.integers(0, 4)), draw(st.sampled_from([0, 10**9, 5 * 10**8])))
    stages = tuple(draw(stage_costs()) for _ in range(n))
    profile = Profile(stages, tuple(edges), link, overhead_ns=draw(st.integers(0, 2)))
    accumulate = draw(st.sampled_from(ACCUMULATE))
    problem = Problem(profile, placement, draw(st.integers(1, max_microbatches)))
    return problem.with_(accumulate=accumulate, kept_gradients=draw(st.booleans()))


@st.composite
def unequal_problems(draw: st.DrawFn, max_ranks: int = 3, max_microbatches: int = 4) -> Problem:
    """Draw problems whose microbatches differ in times, bytes and sizes of messages, some per stage."""
    problem = draw(problems(max_ranks, max_microbatches))
    factor = st.integers(0, 3_000_000)
    row = st.one_of(st.tuples(factor), st.tuples(*[factor] * problem.num_stages))
    costs = tuple(MicrobatchCost(draw(row), draw(row)) for _ in range(problem.num_microbatches))
    objective = draw(st.sampled_from(OBJECTIVES))
    return problem.with_(microbatch_costs=costs, objective=objective)


@st.composite
def step_problems(draw: st.DrawFn, max_ranks: int = 3, max_microbatches: int = 3) -> Problem:
    """Draw problems whose stages are gathered, reduced and updated once a step; some of them are not."""
    problem = draw(problems(max_ranks, max_microbatches))
    amount = st.sampled_from([0, 0, 1, 3, 7, 20])
    stages = tuple(
        replace(cost, unshard_ns=draw(amount), reduce_ns=draw(amount), update_ns=draw(amount))
        for cost in problem.profile.stages
    )
    profile = replace(problem.profile, stages=stages)
    return problem.with_(profile=profile, objective=draw(st.sampled_from(OBJECTIVES)))


def greedy_order(problem: Problem, random: Random | None = None, fuse: float = 0.3) -> Schedule:
    """Return a random legal order: each next action is a random one of those that can run.

    Parameters
    ----------
    fuse
        Share of the (stage, microbatch) pairs that run as BW.
    """
    random = random or Random(0)
    rules = Rules.of(problem)
    fused = frozenset(
        (s, i)
        for s in range(problem.num_stages)
        for i in range(problem.num_microbatches)
        if random.random() < fuse
    )
    todo: list[Action] = []
    for stage in range(problem.num_stages):
        for i in range(problem.num_microbatches):
            todo.append(Action(Kind.FORWARD, stage, i))
            if (stage, i) in fused:
                todo.append(Action(Kind.FULL_BACKWARD, stage, i))
            else:
                todo += [Action(Kind.BACKWARD_INPUT, stage, i), Action(Kind.BACKWARD_WEIGHT, stage, i)]
    order: list[list[Action]] = [[] for _ in range(problem.num_ranks)]
    done: set[Action] = set()
    while todo:
        ready = [a for a in todo if all(b in done for b, _ in predecessors(a, rules, fused))]
        action = ready[random.randrange(len(ready))]
        todo.remove(action)
        done.add(action)
        order[problem.placement.rank_of[action.stage]].append(action)
    return Schedule.of(problem.placement, problem.num_microbatches, order)
