"""Planning for microbatches that differ in cost: their order is chosen together with that of the actions.

1. A problem with microbatches that are alike, each with the mean times and the most bytes of those at hand,
   is planned as any other. Its order fits whatever the order of the microbatches is. So is one with the mean
   of the bytes, whose order may fit some orders of the microbatches only. Published orders are tried too.
2. Each is combined with some orders of the microbatches: as given, shortest first, longest first, longest in
   the middle. The best four pairs go on: the permutation is annealed with the true times and bytes, the order
   of the actions as it is.
3. The best two go on: the order of the actions is annealed with the true times, then the permutation again.

Everything is counted in tries, as in the rest of the planner: the time limit only cuts it off. Where sends
hold up their rank, the kernels' clock is not the true one: there the permutation is changed step by step
under `zbcompile.schedule.simulate`, and the order of the actions stays as it was planned.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zbcompile.errors import CheckError, InfeasibleError
from zbcompile.planner.assignments import bound_of
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.compiled import SearchClock
from zbcompile.planner.core.instance import Codes, Fusing, Instance, shaped, to_codes, to_schedule
from zbcompile.planner.core.unequal import alike_problem
from zbcompile.planner.improve.unequal_anneal import UnequalAnnealer
from zbcompile.planner.incumbent import PlanState, Progress, extended
from zbcompile.planner.starts.classic import orders_for
from zbcompile.planner.starts.initial import one_at_a_time
from zbcompile.schedule.check import check
from zbcompile.schedule.least_memory import check_caps
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Certificate, Solution
from zbcompile.schedule.sum_order import renumbered

__all__ = ["PERMUTE", "plan_unequal"]

PERMUTE = "permute"
"""How lineages and ``without=`` call the search for an order of the microbatches."""

_ROUNDS = 3
"""How often the order of the actions and then the permutation are annealed again."""

_FIRST = 4
"""Pairs of an order of the actions and one of the microbatches whose permutation is annealed at first."""

_KEPT = 2
"""Permutations that go on after the first round."""

_TRIES = 20_000
"""Permutations tried at a time, at level 1, with up to 600 actions; twice as many orders of the actions."""

_HEAT, _LATER_HEAT = 3e-3, 1e-3
"""First temperatures as shares of the value: of the first permutations, and of all that follows."""


@dataclass(frozen=True, slots=True)
class _Found:
    """An order of the actions and of the microbatches, its value in ns, and how it came to be."""

    value: int
    codes: Codes
    order: tuple[int, ...]
    lineage: tuple[str, ...]


class _Search:
    """The best order so far of one problem, and what is left of the time."""

    def __init__(
        self, problem: Problem, bound: Bound, time_limit_s: float, observer: Callable[[Progress], None] | None
    ) -> None:
        self.problem, self.bound, self.observer = problem, bound, observer
        self.started, self.searched, self.limit_s = time.monotonic(), SearchClock(), time_limit_s
        self.annealer = UnequalAnnealer(problem)
        self.scorer = self.annealer.scorer
        self.best: _Found | None = None
        self.interrupted = False

    @property
    def seconds_left(self) -> float:
        """Time until the limit in seconds, the compiling of kernels not counted; none after an interrupt."""
        return 0.0 if self.interrupted else self.limit_s - self.searched.seconds

    def over(self) -> bool:
        """Return whether the time is over, or the best order meets the bound."""
        proved = self.best is not None and self.best.value <= self.bound.value_ns
        return proved or self.seconds_left <= 0

    def offer(self, found: _Found) -> None:
        """Take an order if it is shorter than the best."""
        if self.best is None or found.value < self.best.value:
            self.best = found
            self.tell(" > ".join(found.lineage))

    def tell(self, step: str, state: PlanState = PlanState.SEARCHING) -> None:
        """Tell the observer how far the search is."""
        self.interrupted |= state is PlanState.INTERRUPTED
        if self.observer is not None:
            seconds = time.monotonic() - self.started
            best = None if self.best is None else self.best.value
            self.observer(Progress(best, self.bound.value_ns, seconds, step, state))

    def follow(self, progress: Progress) -> None:
        """Pass on the steps of the plan for microbatches that are alike, without its values."""
        self.tell(f"alike: {progress.step}", progress.state)

    def measure(self, codes: Codes, order: tuple[int, ...]) -> int | None:
        """Return the value of an order in ns under the send mode; ``None`` if it is not legal or hangs."""
        self.scorer.set_order(order)
        if not self.problem.sends.holds_rank:
            score = self.scorer.score(codes)
            return None if score is None else score[0]
        if not self.scorer.fits(codes):
            return None
        try:
            return simulate(renumbered(to_schedule(codes, self.problem), order), self.problem).value_ns
        except CheckError:
            return None


def plan_unequal(
    problem: Problem,
    plan_alike: Callable[[Problem, float, Callable[[Progress], None]], Solution],
    *,
    time_limit_s: float,
    level: int,
    seed: int,
    fusing: Fusing,
    without: frozenset[str],
    observer: Callable[[Progress], None] | None = None,
) -> Solution:
    """Plan the order of the actions and of the microbatches.

    Parameters
    ----------
    problem
        A problem with ``microbatch_costs``, without variants.
    plan_alike
        Plans a problem without them in the seconds given, telling an observer.
    time_limit_s
        Outer limit in seconds; half of it is for ``plan_alike``.
    level, seed, fusing, without, observer
        As in `zbcompile.planner.plan.plan`.

    Raises
    ------
    InfeasibleError
        Some microbatch does not fit by itself.
    """
    check_caps(problem, fusing=fusing is not Fusing.NEVER)
    search = _Search(problem, bound_of(problem), time_limit_s, observer)
    try:
        pool = _first(search, list(_starts(search, plan_alike, fusing, without)), without)
        if problem.sends.holds_rank:
            _step_by_step(search, level, seed, without)
        else:
            _annealed(search, pool, level, seed, without)
    except KeyboardInterrupt:
        search.tell("interrupted", PlanState.INTERRUPTED)
    return _certified(search)


def _starts(
    search: _Search,
    plan_alike: Callable[[Problem, float, Callable[[Progress], None]], Solution],
    fusing: Fusing,
    without: frozenset[str],
) -> Iterator[tuple[Codes, tuple[str, ...]]]:
    """Yield orders of the actions and how they came to be.

    The first fits the microbatches as given. Where microbatches with the most bytes that any has fit, it fits
    whatever their order is.
    """
    problem = search.problem
    mean = problem.alike(lambda costs: sum(costs) // len(costs))
    plain = alike_problem(problem)
    problems = [plain] if plain == mean or all(cap is None for cap in problem.caps) else [plain, mean]
    for alike in problems:
        try:
            found = plan_alike(alike, search.limit_s / 2 / len(problems), search.follow)
        except InfeasibleError:  # no microbatch is the largest everywhere
            if alike is plain:
                yield _one_by_one(problem, fusing), ("one_at_a_time",)
            continue
        yield to_codes(found.schedule), found.certificate.lineage
    if "classic" not in without:
        for name, codes in orders_for(problem):
            yield shaped(codes, fusing), (f"classic {name}",)


def _first(
    search: _Search, starts: Sequence[tuple[Codes, tuple[str, ...]]], without: frozenset[str]
) -> list[_Found]:
    """Return the best few pairs of an order of the actions and a simple order of the microbatches."""
    found: list[_Found] = []
    for codes, lineage in starts:
        for number, order in enumerate(_first_orders(search.problem)):
            if (PERMUTE in without and number) or (search.best is not None and search.over()):
                break
            value = search.measure(codes, order)
            if value is not None:
                way = extended(lineage, PERMUTE) if number else lineage
                found.append(_Found(value, codes, order, way))
                search.offer(found[-1])
    return sorted(found, key=lambda one: one.value)[:_FIRST]


def _one_by_one(problem: Problem, fusing: Fusing) -> Codes:
    """Return an order that runs one microbatch after the other as given, each as it fits by itself."""
    rows: Codes = [[] for _ in range(problem.num_ranks)]
    for i in range(problem.num_microbatches):
        instance = Instance.of(problem.one(i).with_(num_microbatches=1))
        for row, more in zip(rows, one_at_a_time(instance, fusing=fusing is not Fusing.NEVER), strict=True):
            row += more
    return shaped(rows, fusing)


def _first_orders(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield orders of the microbatches: as given, shortest first, longest first, longest in the middle."""
    m = problem.num_microbatches
    work = [sum(stage.work_ns for stage in problem.profile_of(i).stages) for i in range(m)]
    rising = sorted(range(m), key=lambda i: work[i])
    yield tuple(range(m))
    yield tuple(rising)
    yield tuple(rising[::-1])
    yield (*rising[::2], *rising[1::2][::-1])


def _annealed(search: _Search, pool: list[_Found], level: int, seed: int, without: frozenset[str]) -> None:
    """Anneal permutations, then orders of actions and permutations in turn."""
    problem, annealer = search.problem, search.annealer
    actions, m = max(sum(map(len, found.codes)) for found in pool), problem.num_microbatches
    tries = min(_TRIES * level, _TRIES * 600 * level // actions)
    turns, moves = max(500, min(tries, 200 * level * m * m)), max(500, min(2 * tries, 100 * level * actions))

    def stop() -> bool:
        return search.seconds_left <= 0

    def annealed(found: _Found, number: int, heat: float, *, permutes: bool) -> _Found:
        name = PERMUTE if permutes else "anneal"
        if name in without or (permutes and m < 2):
            return found
        codes, order, value = annealer.run(
            found.codes, found.order, turns if permutes else moves, permutes=permutes,
            seed=seed * 1000 + number, heat=heat, goal=search.bound.value_ns, stop=stop,
        )  # fmt: skip
        return _Found(value, codes, order, extended(found.lineage, name))

    for k in range(len(pool)):
        if search.over():
            return
        pool[k] = annealed(pool[k], k + 1, _HEAT, permutes=True)
        search.offer(pool[k])
    pool = sorted(pool, key=lambda found: found.value)[:_KEPT]
    for turn in range(_ROUNDS):
        for k in range(len(pool)):
            if search.over():
                return
            number = 10 * (turn + 1) + 2 * k
            for permutes in (False, True):
                pool[k] = annealed(pool[k], number + permutes, _LATER_HEAT, permutes=permutes)
                search.offer(pool[k])


_STEPS = 30_000
"""Actions that are timed in all while the permutation is changed step by step, at level 1."""


def _step_by_step(search: _Search, level: int, seed: int, without: frozenset[str]) -> None:
    """Change the permutation by swaps that shorten the order, where sends hold up their rank."""
    assert search.best is not None
    if PERMUTE in without or search.problem.num_microbatches < 2:
        return
    codes, lineage = search.best.codes, extended(search.best.lineage, PERMUTE)
    rng, m = random.Random(seed), search.problem.num_microbatches
    for _ in range(max(60, _STEPS * level // sum(map(len, codes)))):
        if search.over():
            return
        order = list(search.best.order)
        a, b = rng.sample(range(m), 2)
        order[a], order[b] = order[b], order[a]
        value = search.measure(codes, tuple(order))
        if value is not None:
            search.offer(_Found(value, codes, tuple(order), lineage))


def _certified(search: _Search) -> Solution:
    """Have the best order judged and timed as the problem's own, and certify it."""
    best, problem, bound = search.best, search.problem, search.bound
    assert best is not None
    schedule = renumbered(to_schedule(best.codes, problem), best.order)
    check(schedule, problem)
    certificate = Certificate(
        problem.objective, best.value, bound.value_ns, bound.method, bound.witness, best.lineage
    )
    return Solution(problem, schedule, certificate, origin=" > ".join(best.lineage))
