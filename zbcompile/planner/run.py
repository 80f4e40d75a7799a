"""One run of the portfolio: what its parts read and change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.compiled import has_kernels
from zbcompile.planner.core.instance import Fusing, Instance
from zbcompile.planner.core.scorer import Scorer, can_score
from zbcompile.planner.incumbent import Incumbent, Order, Progress
from zbcompile.schedule.problem import Problem

__all__ = ["HOPELESS", "Effort", "Options", "PartRun", "Run", "actions_of", "level_of", "nominal_seconds"]

_HOLDING_TRIES = 12
"""List schedules tried where sends hold their rank: each is timed by the slower clock of all send modes."""

HOPELESS = 1.05
"""Orders longer than the best by this factor are not improved, but three are always."""

_DISPATCHED_ONE_OF = 4
"""Of how many recipes of keyed dispatch one is tried under little memory."""

_WIDE = 12
"""Times as many orders are worth improving under little memory (`Run.is_tight`)."""


def level_of(asked: int | None, time_limit_s: float) -> int:
    """Return how much to search: as asked for, else one more for every ten seconds of the time limit."""
    return max(1, round(time_limit_s / 10)) if asked is None else asked


def nominal_seconds(asked: int | None, time_limit_s: float) -> float:
    """Return the seconds of which parts get their shares: the limit, or ten for every level asked for."""
    return time_limit_s if asked is None else min(time_limit_s, 10.0 * asked)


def actions_of(instance: Instance) -> int:
    """Return the number of F's, B's and W's of a step."""
    return 3 * instance.num_stages * instance.num_microbatches


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to search, in tries: the counts, and not the seconds, decide what is found.

    Attributes
    ----------
    list_schedules
        List schedules.
    dispatches
        Tries of keyed dispatch per period of the offset keys.
    anneal
        Annealing tries per order in the first round; three times as many in each further round, over the
        better third of the orders.
    orders
        Most orders annealed: few where every try is slow.
    fusing
        Orders tried with some backwards fused.
    """

    list_schedules: int
    dispatches: int
    anneal: int
    orders: int
    fusing: int

    @staticmethod
    def of(problem: Problem, level: int = 1) -> Effort:
        """Return counts that shrink with the number of actions, so that the seconds stay in bounds."""
        actions = max(1, 3 * problem.num_stages * problem.num_microbatches)
        scale = min(1.0, 1200 / actions)
        holding, several = problem.sends.holds_rank, problem.num_stages > problem.num_ranks
        most, counted = (2000 * level, 3_000_000 * level) if several else (300, 150_000)
        lists = _HOLDING_TRIES if holding else max(60, min(most, counted // actions))
        return Effort(
            lists,
            max(60, int(800 * scale * min(3, level))),
            max(500, int(16_000 * scale * level)),
            12 if actions < 6000 else 5,
            max(200, min(1500, 400_000 // actions)) * level * (4 if holding and several else 1),
        )

    def for_little_memory(self) -> Effort:
        """Return counts that leave more time for annealing, to which shorter first orders mean little."""
        return replace(self, dispatches=self.dispatches // _DISPATCHED_ONE_OF)

    @staticmethod
    def quick(problem: Problem) -> Effort:
        """Return counts for a moment: to rank placements and assignments of variants."""
        several = problem.num_stages > problem.num_ranks
        return Effort(12, 12 if several else 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class PartRun:
    """What one part did in one run.

    Attributes
    ----------
    name, depth
        The part, and how many plans its own is nested in.
    wall_s
        Seconds that it took, those of plans that it made included.
    cpu_s
        Processor seconds of this process while it ran, without those of the parts of plans that it made.
    changed
        What it changed: ``best`` (the best order), ``bound``, ``known`` (the best order of some value),
        ``pool`` (the orders to improve), ``folded`` (those whose middle repeats).
    read
        Which of ``known`` and ``pool`` it looked at.
    """

    name: str
    depth: int
    wall_s: float
    cpu_s: float
    changed: frozenset[str]
    read: frozenset[str]


@dataclass(frozen=True, slots=True)
class Options:
    """What all runs of one plan share.

    Attributes
    ----------
    seed
        Decides all random choices.
    fusing
        Which backwards run fused.
    without
        Names of parts to leave out.
    trace
        Called with a `PartRun` after every part.
    level
        How much to search; by default one more for every ten seconds of the time limit.
    """

    seed: int = 0
    fusing: Fusing = Fusing.AUTO
    without: frozenset[str] = frozenset()
    trace: Callable[[PartRun], None] | None = None
    level: int | None = None


class Run:
    """One problem with its best order, its best bound and what is left of its budget.

    Parameters
    ----------
    problem
        The problem.
    options
        What all runs of one plan share.
    time_limit_s
        Seconds until the search has to end.
    effort
        How much to search; by default as much as the time allows.
    observer
        Called with a `Progress` at every better order or bound.
    inside
        The run that this one is a part of.

    Attributes
    ----------
    problem, instance
        The problem, and the same as plain tuples.
    incumbent
        The best order and bound.
    options, effort, depth
        As given; how many runs this one is nested in.
    level
        How much to search.
    nominal_s
        The seconds of which the solver and the search before it get their shares: the time limit, or ten for
        every level that was asked for.
    reserve_s
        Seconds of the limit that improving leaves for the proofs that come after it.
    inner_cpu_s
        Processor seconds in the runs that this one made.
    folded
        All orders that were found with a middle that repeats.
    read
        Which of ``known`` and ``pool`` the part that runs has looked at.
    pool_changes
        How often the pool was changed.
    """

    def __init__(
        self,
        problem: Problem,
        options: Options | None = None,
        *,
        time_limit_s: float,
        effort: Effort | None = None,
        observer: Callable[[Progress], None] | None = None,
        inside: Run | None = None,
    ) -> None:
        self.problem, self.options = problem, options or Options()
        self.incumbent = Incumbent(
            problem,
            best_bound(problem),
            time_limit_s=time_limit_s,
            observer=observer,
            fusing=self.options.fusing,
        )
        self.instance = self.incumbent.instance
        level = self.options.level
        self.level = level_of(level, time_limit_s)
        self.nominal_s = nominal_seconds(level, time_limit_s)
        self.effort = effort or Effort.of(problem, self.level)
        self.depth: int = 0 if inside is None else inside.depth + 1
        self.inside, self.reserve_s, self.inner_cpu_s = inside, 0.0, 0.0
        self.folded: list[Order] = []
        self.read: set[str] = set()
        self.pool_changes: int = 0
        self._pool: list[Order] | None = None
        if effort is None and self.sieves:
            self.effort = self.effort.for_little_memory()

    @property
    def seed(self) -> int:
        """What decides all random choices."""
        return self.options.seed

    @property
    def bound(self) -> Bound:
        """The best bound."""
        return self.incumbent.bound

    @property
    def value(self) -> int | None:
        """Value of the best order in ns, ``None`` before the first."""
        return self.incumbent.value

    @property
    def proved(self) -> bool:
        """Whether the best order meets the bound."""
        return self.incumbent.proved

    @property
    def done(self) -> bool:
        """Whether the best order meets the bound, or there is an order and the time is over."""
        return self.incumbent.done

    @property
    def seconds_left(self) -> float:
        """Time until the limit in seconds."""
        return self.incumbent.seconds_left

    def over(self) -> bool:
        """Return whether the time is over."""
        return self.seconds_left <= 0

    @property
    def holds_rank(self) -> bool:
        """Whether a send holds up its rank."""
        return self.problem.sends.holds_rank

    @property
    def several(self) -> bool:
        """Whether some rank has several stages."""
        return any(len(stages) > 1 for stages in self.instance.stages_of)

    @property
    def alone(self) -> bool:
        """Whether every rank has one stage."""
        return all(len(stages) == 1 for stages in self.instance.stages_of)

    @property
    def actions(self) -> int:
        """Number of F's, B's and W's of a step."""
        return actions_of(self.instance)

    @cached_property
    def scorer(self) -> Scorer:
        """The scorer of the problem, for one thread, where no send holds up its rank.

        The observer is told when this is the first of the process, since kernels may have to be compiled.
        """
        if not has_kernels():
            self.incumbent.report("compile")
        scorer = Scorer(self.instance)
        if can_score(self.instance) and not self.holds_rank:
            self.incumbent.scorer = scorer
        return scorer

    @property
    def known(self) -> list[tuple[int, Order]]:
        """Up to twelve (value, order) of different values, best first."""
        self.read.add("known")
        return self.incumbent.known

    @property
    def pool(self) -> list[Order]:
        """The orders to improve, best first, one per score: at first what is known when it is asked for."""
        self.read.add("pool")
        if self._pool is None:
            self._pool = _distinct([self.scored(order) for _, order in self.known])
        return self._pool

    @pool.setter
    def pool(self, orders: list[Order]) -> None:
        if orders != self._pool:
            self._pool = orders
            self.pool_changes += 1

    @property
    def is_tight(self) -> bool:
        """Whether ranks have several stages and each less memory than V-Half takes.

        Every microbatch then costs time, no bound is close, and the value of an order says little about what
        annealing makes of it. V-Half takes p / 2 + 1 microbatches of all stages of a rank.
        """
        instance = self.instance
        saved = [sum(instance.saved[s] for s in stages) for stages in instance.stages_of]
        half = min(instance.num_ranks // 2 + 1, instance.num_microbatches)
        return self.several and all(
            room < half * size for room, size in zip(instance.headroom, saved, strict=True)
        )

    @property
    def sieves(self) -> bool:
        """Whether a short look at many orders decides which are annealed: under little memory.

        Not where microbatches are many, since repetitions are then taken out or put in, nor in a part of
        another run, which may put them into what is found.
        """
        few = self.instance.num_microbatches <= 4 * self.instance.num_ranks
        return self.is_tight and few and self.inside is None

    def promising(self, *, wide: bool = False) -> list[Order]:
        """Return the orders of the pool that are worth improving: as many as the effort allows.

        ``wide``: under little memory many more, and longer ones the further the best is from the bound.
        """
        count, most = self.effort.orders, HOPELESS
        best = self.pool[:1]
        if wide and self.is_tight and best and best[0].score is not None:
            count, bound = _WIDE * count, max(1, self.bound.value_ns)
            most += 3 * max(0.0, best[0].score[0] / bound - 1)
        best = self.pool[:count]
        longest = most * best[0].score[0] if best and best[0].score else 0
        return [o for k, o in enumerate(best) if k < 3 or (o.score is not None and o.score[0] <= longest)]

    def join(self, found: Iterable[Order]) -> None:
        """Let orders with a score join the pool."""
        self.pool = _distinct([*found, *self.pool])

    def scored(self, order: Order) -> Order:
        """Return the order with its score; without one if it is not legal."""
        return replace(order, score=self.scorer.score(order.codes))

    def inner(self, problem: Problem, seconds: float, effort: Effort | None = None) -> Run:
        """Return a run on another problem as a part of this one."""
        return Run(problem, self.options, time_limit_s=seconds, effort=effort, inside=self)


def _distinct(orders: list[Order]) -> list[Order]:
    """Return the orders with a score, best first, one per score."""
    scored = [(order.score, order) for order in orders if order.score is not None]
    result: list[Order] = []
    for score, order in sorted(scored, key=lambda entry: entry[0]):
        if not result or score != result[-1].score:
            result.append(order)
    return result
