"""Random small problems of every kind, planned, judged and certified, against orders found without bounds.

A problem has any placement, chain or branches, times and bytes of zero, fused backwards, a send mode,
gradient bytes, costs once a step, ranks of different speed; and at times variants, microbatches that differ,
or cuts that are planned. Its truth is the least value over all orders, by brute force where there are few and
by the exact model otherwise; where neither can say, the best of many random orders.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.prove.cases import make_problem
from tests.support.planner_cases import brute_force, rank_orders
from tests.support.strategies import greedy_order
from zbcompile.errors import CheckError, InfeasibleError, NoOrderError
from zbcompile.planner.assignments import fixed
from zbcompile.planner.bounds.analytic import analytic_bounds
from zbcompile.planner.bounds.blocking_send import blocking_send_bound
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.cuts import best_cut, shared_bound
from zbcompile.planner.certify.certificate import verify_certificate
from zbcompile.planner.certify.cuts import cuts_bound
from zbcompile.planner.certify.facts import Derivation
from zbcompile.planner.certify.methods import rederived
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.times import Clock
from zbcompile.planner.cuts import plan_cuts
from zbcompile.planner.exact.model import solve_exact
from zbcompile.planner.joint_bound import joint_bound
from zbcompile.planner.plan import plan
from zbcompile.schedule.check import faults
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.cuts import CutProblem
from zbcompile.schedule.least_memory import check_caps, least_headroom
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import TRANSPORTS, Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Solution
from zbcompile.schedule.speeds import on_ranks, speeds_of
from zbcompile.schedule.sum_order import renumbered

__all__ = ["Outcome", "Task", "attack", "attack_bounds", "make_task"]

MOST_ACTIONS = 24
"""Most F's, B's and W's of a step."""

MOST_ORDERS = 20_000
"""Most orders of all ranks that are tried by brute force."""

RANDOM_ORDERS = 60
"""Random orders that are tried where neither brute force nor the exact model can say."""


@dataclass(frozen=True, slots=True)
class Task:
    """A problem, or pieces whose cuts are planned with the order.

    Attributes
    ----------
    problem
        The problem; with cuts its frame.
    cuts
        The pieces, where cuts are planned.
    """

    problem: Problem
    cuts: CutProblem | None = None

    @property
    def kind(self) -> str:
        """What decides how it is planned."""
        if self.cuts is not None:
            return "cuts"
        if self.problem.microbatch_costs:
            return "unequal"
        return "variants" if self.problem.profile.offers_variants else self.problem.transport

    def problems(self) -> Iterator[Problem]:
        """Yield the problem under every choice of variants or cuts that fits."""
        for problem in self._choices():
            try:
                check_caps(problem)
            except InfeasibleError:
                continue
            yield problem

    def _choices(self) -> Iterator[Problem]:
        if self.cuts is not None:
            count, stages = self.cuts.pieces.num_stages, self.problem.num_stages
            for ends in itertools.combinations(range(1, count), stages - 1):
                yield self.cuts.problem([b - a for a, b in itertools.pairwise((0, *ends, count))])
            return
        levels = [range(1 + len(stage.variants)) for stage in self.problem.profile.stages]
        for assignment in itertools.product(*levels):
            yield fixed(self.problem, assignment) if any(map(len, levels)) else self.problem

    def plan(self, seconds: float) -> Solution:
        """Plan it."""
        if self.cuts is not None:
            return plan_cuts(self.cuts, time_limit_s=seconds, level=1)
        return plan(self.problem, time_limit_s=seconds, level=1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task.

    Attributes
    ----------
    faults
        What does not hold, in words.
    optimal
        Whether the plan was proved optimal; None where nothing fits.
    missed
        Whether the plan is longer than the truth.
    """

    faults: tuple[str, ...]
    optimal: bool | None = None
    missed: bool = False


def make_task(seed: int) -> Task:
    """Return a task of at most `MOST_ACTIONS` actions per choice of variants or cuts."""
    rng = random.Random(seed)
    kind = rng.choice(("plain", "plain", "plain", "variants", "unequal", "cuts"))
    few = {"plain": MOST_ACTIONS, "variants": 18, "unequal": MOST_ACTIONS, "cuts": 18}[kind]
    problem = make_problem(seed, most_actions=few)
    problem = problem.with_(
        transport=rng.choice((TRANSPORTS[0], *TRANSPORTS)),
        accumulate=rng.choice(("order", "order", "memory")),
        kept_gradients=rng.random() < 0.15,
    )
    profile = problem.profile
    profile = replace(profile, overhead_ns=rng.choice((0, 0, 1)))
    if rng.random() < 0.4:
        profile = _each(profile, lambda: {"gradient_bytes": rng.choice((0, 1, 3, 7))})
    if rng.random() < 0.4:
        profile = _each(
            profile,
            lambda: {
                "unshard_ns": rng.choice((0, 0, 1, 6)),
                "reduce_ns": rng.choice((0, 1, 4, 15)),
                "update_ns": rng.choice((0, 0, 2, 9)),
            },
        )
    if rng.random() < 0.3:
        profile = _each(profile, lambda: {"static_bytes": rng.randint(0, 4)})
    if rng.random() < 0.3:
        profile = replace(
            profile,
            edges=tuple(
                replace(e, forward_bytes=rng.randint(0, 3), backward_bytes=rng.randint(0, 3))
                for e in profile.edges
            ),
            link=replace(profile.link, bytes_per_second=10**9),
        )
    speeds: tuple[int, ...] = ()
    if rng.random() < 0.3:
        speeds = speeds_of([rng.choice((1, 0.5, 0.7, 2)) for _ in range(problem.num_ranks)])
    if kind == "cuts":
        return _with_cuts(rng, problem, profile, speeds)
    if kind == "variants":
        profile = replace(profile, stages=tuple(_with_variants(rng, stage) for stage in profile.stages))
    problem = problem.with_(profile=on_ranks(profile, problem.placement, speeds))
    if kind == "unequal" and problem.num_microbatches > 1:
        costs = [_microbatch(rng, problem.num_stages) for _ in range(problem.num_microbatches)]
        problem = problem.with_(microbatch_costs=tuple(costs))
    return Task(_with_caps(rng, problem))


def _each(profile: Profile, costs: Callable[[], dict[str, Any]]) -> Profile:
    """Return the profile with some costs of every stage drawn anew."""
    return replace(profile, stages=tuple(replace(stage, **costs()) for stage in profile.stages))


def _with_variants(rng: random.Random, stage: StageCost) -> StageCost:
    """Return a stage with a variant that holds less and takes longer, or any other."""
    if rng.random() < 0.4:
        return stage
    saved, more = rng.randint(0, stage.saved_bytes), rng.randint(0, 4)
    backward = max(0, stage.backward_input_ns + more - rng.choice((0, 0, 2)))
    both = backward + stage.backward_weight_ns
    lean = StageCost(
        stage.forward_ns,
        backward,
        stage.backward_weight_ns,
        max(0, both - rng.choice((0, 0, 2))),
        saved,
        rng.randint(0, stage.saved_for_weight_bytes + 1),
    )
    return replace(stage, variants=(lean,))


def _microbatch(rng: random.Random, num_stages: int) -> MicrobatchCost:
    """Return the factors of a microbatch, for all stages or for each, some of them zero."""

    def factors() -> tuple[int, ...]:
        count = rng.choice((1, num_stages))
        return tuple(rng.choice((0, 300_000, 1_000_000, 1_000_000, 2_500_000)) for _ in range(count))

    return MicrobatchCost(factors(), rng.choice(((1_000_000,), factors())))


def _with_caps(rng: random.Random, problem: Problem) -> Problem:
    """Return the problem with caps from the least that works, or a byte below it at times."""
    caps: list[int | None] = []
    for rank in range(problem.num_ranks):
        least = problem.static_bytes(rank) + least_headroom(problem, rank)
        loose = int(least * rng.uniform(1, 2.5)) + rng.randint(0, 2)
        caps.append(rng.choice((least, least, loose, loose, loose, None)))
    return problem.with_(caps=tuple(caps))


def _with_cuts(rng: random.Random, problem: Problem, profile: Profile, speeds: tuple[int, ...]) -> Task:
    """Return pieces, one or two more than stages, cut under the problem's caps."""
    stages = list(profile.stages)
    stages += [rng.choice(stages) for _ in range(rng.randint(1, 2))]
    known = {(e.source, e.target) for e in profile.edges}
    links = [(k, k + 1) for k in range(len(stages) - 1) if (k, k + 1) not in known]
    edges = [*profile.edges, *(Edge(*link, rng.randint(0, 2), rng.randint(0, 2)) for link in links)]
    pieces = replace(profile, stages=tuple(stages), edges=tuple(edges))
    caps = tuple(None if cap is None else int(1.7 * cap) for cap in problem.caps)
    task = CutProblem.of(
        pieces,
        problem.placement,
        problem.num_microbatches,
        caps,
        problem.objective,
        problem.transport,
        speeds,
        accumulate=problem.accumulate,
        kept_gradients=problem.kept_gradients,
    )
    return Task(task.frame, task)


def attack(task: Task, *, seconds: float = 2.0, exact_s: float = 4.0, seed: int = 0) -> Outcome:
    """Plan a task, check what is claimed of it, and compare it with the truth."""
    problems = list(task.problems())
    try:
        solution = task.plan(seconds)
    except InfeasibleError as error:
        return Outcome((f"refused, but some choice fits: {error}",) if problems else ())
    except NoOrderError as error:
        return Outcome(() if task.problem.sends.holds_rank else (f"no order: {error}",))
    found = list(_claims(solution))
    if not problems:
        return Outcome((*found, "an order where nothing fits"))
    value, bound = solution.certificate.value_ns, solution.certificate.bound_ns
    truths = [truth(problem, exact_s, seed) for problem in problems]
    known = [least for least, _ in truths if least is not None]
    least = min(known, default=value)
    if bound > least:
        found.append(f"bound {bound} by {solution.certificate.method} above an order of {least}")
    sure = len(known) == len(truths) and all(sure for _, sure in truths)
    if sure and value < least:
        found.append(f"value {value} below the truth {least}")
    for problem, (here, _) in zip(problems, truths, strict=True):
        found += _bounds(problem, here)
    return Outcome(tuple(found), solution.certificate.is_optimal, value > least)


def attack_bounds(task: Task, *, exact_s: float = 1.0, seed: int = 0) -> Outcome:
    """Compare the bounds of a task with the truth, without a plan, and derive each of them again."""
    problems, found = list(task.problems()), list[str]()
    truths = [truth(problem, exact_s, seed) for problem in problems]
    for problem, (here, _) in zip(problems, truths, strict=True):
        found += _bounds(problem, here)
    known = [least for least, _ in truths if least is not None]
    if known and task.kind == "variants":
        found += _above(joint_bound(task.problem), min(known))
    if task.cuts is not None and problems:
        bound = cuts_bound_of(task.cuts)
        found += _above(bound, min(known, default=None))
        found += _cuts_again(task.cuts, bound)
    return Outcome(tuple(found))


def cuts_bound_of(cuts: CutProblem) -> Bound:
    """Return the bound over all cuts of pieces."""
    best = best_cut(cuts) if cuts.in_order else None
    return shared_bound(cuts) if best is None else best.bound


def _cuts_again(cuts: CutProblem, bound: Bound) -> Iterator[str]:
    """Yield why the bound over all cuts is not derived again."""
    count, stages = cuts.pieces.num_stages, cuts.frame.num_stages
    sizes = bound.witness.get("sizes") or (*(1,) * (stages - 1), count - stages + 1)
    assert isinstance(sizes, list | tuple)
    try:
        total = cuts_bound(cuts.problem(sizes), cuts.cuts(sizes), bound.witness, bound.value_ns, Derivation())
    except CheckError as error:
        yield f"cuts is not derived again: {error}"
        return
    if total != bound.value_ns:
        yield f"cuts {bound.value_ns} is derived as {total}"


def _above(bound: Bound, least: int | None) -> Iterator[str]:
    """Yield that a bound lies above an order, if it does."""
    if least is not None and bound.value_ns > least:
        yield f"{bound.method} {bound.value_ns} above an order of {least}: {bound.witness}"


def _claims(solution: Solution) -> Iterator[str]:
    """Yield what a solution claims and is not so."""
    problem, certificate = solution.problem, solution.certificate
    yield from (f"judge: {fault}" for fault in faults(solution.schedule, problem))
    timed = simulate(solution.schedule, problem).value_ns
    if timed != certificate.value_ns:
        yield f"value {certificate.value_ns}, simulated {timed}"
    yield from _fault_of(solution)


def _fault_of(solution: Solution) -> Iterator[str]:
    """Yield why a certificate is not derived again."""
    try:
        verified = verify_certificate(solution, time_limit_s=5)
    except CheckError as error:
        yield f"certificate by {solution.certificate.method}: {error}"
        return
    if verified.derived_ns > verified.value_ns:
        yield f"derived {verified.derived_ns} above {verified.value_ns}"


def _bounds(problem: Problem, least: int | None) -> Iterator[str]:
    """Yield the bounds of a problem that lie above an order, or that are not derived again."""
    bounds = analytic_bounds(problem)
    blocking = blocking_send_bound(problem) if problem.sends.travel_is_work else None
    for bound in (*bounds, *(() if blocking is None else (blocking,))):
        yield from _above(bound, least)
        try:
            again = rederived(problem, bound)
        except CheckError as error:
            yield f"{bound.method} is not derived again: {error}"
            continue
        if again != bound.value_ns:
            yield f"{bound.method} {bound.value_ns} is derived as {again}"


def truth(problem: Problem, seconds: float, seed: int) -> tuple[int | None, bool]:
    """Return the least value that is known of a problem, and whether no order is shorter."""
    if problem.microbatch_costs:
        return _random_orders(problem, seed), False
    if _few(problem):
        return brute_force(problem, fusing=True), True
    clock = Clock.of(problem) if problem.sends.holds_rank else None
    result = solve_exact(Instance.of(problem), lower=0, time_limit_s=seconds, clock=clock)
    return result.value_ns, result.proved


def _few(problem: Problem) -> bool:
    """Return whether brute force is quick."""
    total, m = 1, problem.num_microbatches
    for rank in range(problem.num_ranks):
        stages = problem.placement.stages_of(rank)
        if m * len(stages) > 2:
            return False
        total *= len(rank_orders(stages, m, fusing=True))
    return total <= MOST_ORDERS


def _random_orders(problem: Problem, seed: int) -> int | None:
    """Return the least value of random orders of actions and microbatches that fit."""
    rng, least = random.Random(seed), None
    for _ in range(RANDOM_ORDERS):
        schedule = greedy_order(problem, rng)
        turns = list(range(problem.num_microbatches))
        rng.shuffle(turns)
        schedule = renumbered(schedule, tuple(turns))
        if not faults(schedule, problem):
            value = simulate(schedule, problem).value_ns
            least = value if least is None else min(least, value)
    return least
