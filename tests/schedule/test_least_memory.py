"""The least cap under which an order exists, against a search over every sequence of one microbatch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.planner_cases import random_placement
from zbcompile.errors import InfeasibleError
from zbcompile.planner.core.instance import Fusing, Instance, shaped, to_schedule
from zbcompile.planner.plan import plan
from zbcompile.planner.starts.initial import one_at_a_time
from zbcompile.schedule.check import faults
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.least_memory import check_caps, least_headroom
from zbcompile.schedule.one_microbatch import OneMicrobatch
from zbcompile.schedule.problem import Problem


def branching_problem(rng: random.Random, num_microbatches: int = 1) -> Problem:
    """Up to five stages on up to three ranks, with any edges, some without gradients."""
    ranks = rng.randint(1, 3)
    placement = random_placement(rng, ranks) if rng.random() < 0.7 else Placement((0,) * rng.randint(2, 5))
    n = placement.num_stages
    edges = tuple(
        Edge(a, b, has_gradient=rng.random() < 0.8)
        for a in range(n)
        for b in range(a + 1, n)
        if rng.random() < (0.7 if b == a + 1 else 0.2)
    )
    stages = tuple(
        StageCost.simple(
            rng.randint(0, 4), rng.randint(0, 4), rng.randint(0, 3), rng.randint(0, 5), rng.randint(0, 6)
        )
        for _ in range(n)
    )
    return Problem.of(Profile(stages, edges or (Edge(0, n - 1),)), placement, num_microbatches)


def fits_by_hand(problem: Problem, room: Sequence[int | None], *, fusing: bool) -> bool:
    """Whether some sequence of F, B, W or BW fits: by every set of actions that can be done."""
    stages, rank_of = problem.profile.stages, problem.placement.rank_of
    waits_f = {s: [e.source for e in problem.profile.edges if e.target == s] for s in range(len(stages))}
    waits_b = {
        s: [e.target for e in problem.profile.edges if e.source == s and e.has_gradient]
        for s in range(len(stages))
    }
    # Per stage 0: nothing done, 1: F, 2: F and B, 3: all
    start = (0,) * len(stages)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        if min(state) == 3:
            return True
        for s, at in enumerate(state):
            if at == 3 or (at == 0 and any(state[x] < 1 for x in waits_f[s])):
                continue
            if at == 1 and any(state[x] < 2 for x in waits_b[s]):
                continue
            for to in (2, 3) if at == 1 and fusing else (at + 1,):
                after = (*state[:s], to, *state[s + 1 :])
                held = [0] * problem.num_ranks
                for t, level in enumerate(after):
                    held[rank_of[t]] += (0, stages[t].saved_bytes, stages[t].saved_for_weight_bytes, 0)[level]
                if after not in seen and all(r is None or h <= r for h, r in zip(held, room, strict=True)):
                    seen.add(after)
                    todo.append(after)
    return False


@pytest.mark.parametrize("fusing", [True, False])
def test_the_least_headroom_of_a_rank_is_exact(fusing: bool) -> None:
    rng, chain_needs_more = random.Random(1), 0
    for _ in range(150):
        problem = branching_problem(rng)
        rank = rng.randrange(problem.num_ranks)
        least = least_headroom(problem, rank, fusing=fusing)
        for room, expected in ((least, True), (least - 1, False)):
            given = [room if r == rank else None for r in range(problem.num_ranks)]
            assert fits_by_hand(problem, given, fusing=fusing) is expected, (problem, rank, least)
        one = OneMicrobatch.of(problem, fusing=fusing)
        chain_needs_more += one.peaks(one.forwards_first())[rank] > least
    assert chain_needs_more >= 20


@pytest.mark.parametrize("fusing", [True, False])
def test_caps_are_refused_exactly_where_no_order_fits(fusing: bool) -> None:
    """And where they are not, the fallback fits, for any number of microbatches."""
    rng, refused, together = random.Random(2), 0, 0
    for _ in range(300):
        problem = branching_problem(rng, rng.randint(1, 3))
        least = [least_headroom(problem, r, fusing=fusing) for r in range(problem.num_ranks)]
        problem = problem.with_(caps=tuple(rng.choice((n - 1, n, n, n + 1)) if n else None for n in least))
        if fits_by_hand(problem, problem.caps, fusing=fusing):
            check_caps(problem, fusing=fusing)
            shape = Fusing.AUTO if fusing else Fusing.NEVER
            codes = shaped(one_at_a_time(Instance.of(problem), fusing=fusing), shape)
            assert faults(to_schedule(codes, problem), problem) == []
            continue
        refused += 1
        with pytest.raises(
            InfeasibleError, match="no order fits: .* bytes on rank|no room together"
        ) as found:
            check_caps(problem, fusing=fusing)
        together += "together" in found.value.what
        if "together" not in found.value.what:
            rank = int(str(found.value.where).split()[1])
            assert (found.value.given, found.value.needed) == (problem.caps[rank], least[rank])
    assert refused >= 50


def test_ranks_that_fit_alone_may_not_fit_together() -> None:
    """Stage 0 is held until 2 has run, 1 until 3; 2 waits for 1 and 3 for 0: one of the ranks holds both."""
    stage = StageCost.simple(1, 1, 1, 1, 0)
    edges = (Edge(0, 2), Edge(1, 3), Edge(0, 3, has_gradient=False), Edge(1, 2, has_gradient=False))
    problem = Problem.of(Profile((stage,) * 4, edges), Placement((0, 1, 1, 0)), 1, 1)
    assert [least_headroom(problem, r) for r in range(2)] == [1, 1]
    assert not fits_by_hand(problem, (1, 1), fusing=True)
    with pytest.raises(
        InfeasibleError, match="ranks 0 and 1 leave no room together; rank 0 needs 2"
    ) as found:
        check_caps(problem)
    assert (found.value.needed, found.value.given) == (2, 1)
    check_caps(problem.with_(caps=(2, 1)))


def test_branches_need_no_more_than_their_order() -> None:
    """The two rows of the fault: stages side by side, and an edge that hands no gradient back."""
    stage = StageCost.simple(3, 3, 2, 4, 2)
    beside = Problem.of(Profile((stage,) * 3, (Edge(0, 1), Edge(0, 2))), Placement((0, 1, 1)), 2, (100, 4))
    assert plan(beside, time_limit_s=5).certificate.value_ns == 38
    one_way = Problem.of(Profile((stage,) * 2, (Edge(0, 1, has_gradient=False),)), Placement((0, 0)), 2, 4)
    assert plan(one_way, time_limit_s=5).certificate.value_ns == 32
    with pytest.raises(InfeasibleError, match="needs 4 bytes on rank 0"):
        plan(one_way.with_(caps=(3,)))


def test_a_search_that_gives_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not looked at to the end is not called impossible, and the cap that it names works."""
    stages = tuple(StageCost.simple(1, 1, 1, saved, 0) for saved in (5, 7, 9, 6, 8, 5))
    pairs = Profile(stages, tuple(Edge(s, s + 3) for s in range(3)))
    problem = Problem.of(pairs, Placement((0,) * 6), 1, 17)
    assert least_headroom(problem, 0) == 15
    check_caps(problem)
    fit = OneMicrobatch.fit
    monkeypatch.setattr(OneMicrobatch, "fit", lambda one, room, rank=None, _=0: fit(one, room, rank, 1))
    assert least_headroom(problem, 0) <= 15
    with pytest.raises(InfeasibleError, match="none found in 4 beginnings; all forwards first need 40 bytes"):
        check_caps(problem)
    check_caps(problem.with_(caps=(40,)))


def test_a_long_chain_is_judged_at_once() -> None:
    stage = StageCost.simple(1, 1, 1, 2, 1)
    problem = Problem.of(Profile.uniform(stage, 1000), Placement.looped(2, 500), 2, 999)
    with pytest.raises(InfeasibleError, match="needs 1000 bytes on rank 0"):
        check_caps(problem)
