"""Random small planning problems, published ones, and brute force over every order."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache, partial

from tests.support.memory_oracle import fits_by_hand
from tests.support.places import DATA
from zbcompile.planner.core.instance import BW, KINDS, B, Codes, F, Instance, W, numbered
from zbcompile.planner.core.score import value_of
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.core.times import Clock
from zbcompile.planner.exact.model import solve_exact
from zbcompile.planner.plan import plan
from zbcompile.planner.portfolio import NAMES
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Action, Placement
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import Problem

PEER = json.loads((DATA / "peer_schedules.json").read_text())["runs"]
V_STAGE = StageCost.simple(11_347, 11_248, 8_132, 34, 16)


def random_placement(rng: random.Random, ranks: int) -> Placement:
    """Linear, looped, V, or an uneven map with up to three stages on a rank."""
    kind = rng.choice(("looped", "v", "map"))
    if kind == "looped":
        return Placement.looped(ranks, 2)
    if kind == "v":
        return Placement.v(ranks, 2)
    extra = [rng.randrange(ranks) for _ in range(rng.randint(1, 2))]
    order = list(range(ranks)) + extra
    rng.shuffle(order)
    return Placement(tuple(order))


def random_problem(
    rng: random.Random,
    *,
    ranks: int,
    microbatches: int,
    placement: Placement | None = None,
    longest: int = 6,
    objective: str | None = None,
) -> Problem:
    """Unequal stages and caps between the least that works and one that binds little."""
    placement = placement or Placement.linear(ranks)
    stages = tuple(
        StageCost.simple(
            rng.randint(1, longest),
            rng.randint(1, longest),
            rng.randint(0, longest),
            saved := rng.randint(2, 6),
            rng.randint(0, saved),
        )
        for _ in range(placement.num_stages)
    )
    profile = Profile(stages, link=Link(rng.randint(0, 2)))
    objective = objective or rng.choice(("span", "makespan"))
    problem = Problem.of(profile, placement, microbatches, None, objective)
    least = [least_headroom(problem, r) for r in range(ranks)]
    caps = tuple(max(need, int(need * rng.uniform(1, microbatches))) for need in least)
    return problem.with_(caps=caps)


@cache
def rank_orders(
    stages: tuple[int, ...], microbatches: int, fusing: bool = False
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Every order of one rank in which F(i) precedes B(i) precedes W(i), or F(i) BW(i), for each stage."""
    found = []

    def extend(row: tuple[tuple[int, int], ...], count: dict[tuple[int, int], int]) -> None:
        if all(count[F, s] == count[B, s] == microbatches and not count[W, s] for s in stages):
            found.append(row)
            return
        for s in stages:
            if count[F, s] < microbatches:
                extend((*row, (F, s)), {**count, (F, s): count[F, s] + 1})
            if count[B, s] < count[F, s]:
                done = {**count, (B, s): count[B, s] + 1}
                extend((*row, (B, s)), {**done, (W, s): count[W, s] + 1})
                if fusing:
                    extend((*row, (BW, s)), done)
            if count[W, s]:  # of these W's wait
                extend((*row, (W, s)), {**count, (W, s): count[W, s] - 1})

    extend((), {(kind, s): 0 for kind in (F, B, W) for s in stages})
    return tuple(found)


def brute_force(problem: Problem, *, fusing: bool = False) -> int:
    """Least value over every order of every rank that fits, by hand, and does not deadlock.

    Where sends hold their rank, it is timed by the clock that lowers it (equal to `simulate` by test).
    """
    instance, value = Instance.of(problem), partial(value_of, Instance.of(problem))
    if problem.sends.holds_rank:
        value = Clock.of(problem).value
    alone = [
        [
            list(row)
            for row in rank_orders(stages, problem.num_microbatches, fusing)
            if fits_by_hand(problem, rank, _numbered(row))
        ]
        for rank, stages in enumerate(instance.stages_of)
    ]
    values = (value(list(rows)) for rows in itertools.product(*alone))
    return min(value for value in values if value is not None)


@cache
def _numbered(row: tuple[tuple[int, int], ...]) -> tuple[Action, ...]:
    """The actions of a row."""
    return tuple(Action(KINDS[kind], s, i) for kind, s, i in numbered([row])[0])


def exact_value(problem: Problem) -> int:
    """The optimum, proved by CP-SAT without any bound of ours."""
    result = solve_exact(Instance.of(problem), lower=0, time_limit_s=120)
    assert result.proved, "the instance is too large for this test"
    assert result.value_ns == result.bound_ns
    return result.bound_ns


def v_problem(p: int, m: int, cap: int, latency: int = 754) -> Problem:
    """Two equal stages per rank in a V."""
    return Problem.of(Profile.uniform(V_STAGE, 2 * p, latency), Placement.v(p), m, cap, "span")


def compile_kernels() -> None:
    """Plan what needs the search's kernels, so that numba's cache has them; no limit counts that.

    The parts that need none are left out: beside other processes they would take all of the time.
    """
    alike = v_problem(3, 9, 3 * 34)
    others = set(NAMES) - {"one_at_a_time", "list_schedule", "anneal"}
    for problem in (alike, alike.with_(microbatch_costs=tuple(map(MicrobatchCost.of, range(1, 10))))):
        plan(problem, level=1, time_limit_s=1.0, without=others)


def peer_problem(p: int, m: int, name: str, objective: str) -> tuple[Problem, int]:
    """A published profile at the memory of the peer's own order, and the value of that order."""
    row = next(r for r in PEER if r["set"] == "paper" and (r["p"], r["m"]) == (p, m))
    peer = row["schedules"][name]
    stage = StageCost.simple(row["TF"] * 500, row["TB"] * 500, row["TW"] * 500, row["mem"][0], -row["mem"][2])
    cap = round(2 * row["mem"][0] * peer["peak_over_MB"])
    profile = Profile.uniform(stage, 2 * p, row["Tcomm"] * 1000)
    problem = Problem.of(profile, Placement.v(p), m, cap, objective)
    return problem, round(peer["longest_stage" if objective == "span" else "makespan"] * 1000)


def score(instance: Instance, codes: Codes | None) -> int:
    """The objective of a legal order."""
    assert codes is not None
    found = Scorer(instance).score(codes)
    assert found is not None
    return found[0]
