"""Planning from a problem to a certified order: bound, initial orders, search, proof, certificate."""

from __future__ import annotations

import random
from collections.abc import Callable

from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.bounds.blocking_send import blocking_send_bound
from zbcompile.planner.core.instance import Fusing
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.exact.proofs import (
    EXACT_ACTIONS,
    crossing_applies,
    proof_share,
    prove_crossing,
    prove_exact,
    prove_from_below,
    quick_crossing_bound,
)
from zbcompile.planner.improve.fuse import fusing_tries, improve_fusing
from zbcompile.planner.incumbent import Incumbent, Progress
from zbcompile.planner.search import Effort, Search
from zbcompile.planner.starts.coarse import coarse_problem, taken_apart
from zbcompile.planner.starts.initial import rounds_tries, try_classic, try_list_schedules, try_rounds
from zbcompile.planner.starts.offset_key_orders import offset_key_orders
from zbcompile.planner.starts.stretch import stretch
from zbcompile.planner.variants import fixed, offers_variants, plan_variants
from zbcompile.schedule.least_memory import check_caps
from zbcompile.schedule.limits import check_plannable, check_seed
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution

__all__ = ["Progress", "plan"]

_LONG = 2500
"""Actions beyond which several stages per rank are planned short first."""

_HOLDING_TRIES = 12
"""List schedules tried where sends hold their rank: each is timed by the slower clock of all send modes."""

_BLOCKS = 12
"""The microbatches to repeat are a multiple of this, so that blocks of 1, 2, 3, 4, 6 and 12 will do."""


def plan(
    problem: Problem,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    observer: Callable[[Progress], None] | None = None,
    fuse: str | Fusing = Fusing.AUTO,
    variants: bool = True,
) -> Solution:
    """Find the best order that the time allows, with a certificate.

    Ctrl-C ends the search and keeps the best order.

    Parameters
    ----------
    problem
        What to plan for.
    time_limit_s
        Outer limit in seconds. The search is counted in tries, more of them for a higher limit, so that the
        same seed and limit give the same bytes wherever proof or count ends the search.
    seed
        Decides all random choices.
    observer
        Called with a `Progress` at every better order or bound.
    fuse
        ``auto`` (BW where it helps), ``never`` or ``always``.
    variants
        Whether stages may run as one of their variants.

    Returns
    -------
    Solution
        The order with its certificate.

    Raises
    ------
    InfeasibleError
        No order fits under the caps; names the rank and the least cap that works.
    NoOrderError
        No order was found in the time given.
    UsageError
        The choice of fusing is unknown, the seed is out of range, or the problem is too large
        (`zbcompile.schedule.limits`).

    Notes
    -----
    The limit cuts the search off between tries. Making, judging and bounding one order is never cut off: that
    takes about a second for every 20,000 stages times microbatches, three where sends hold up their rank. The
    limits on the size keep it to twice the time limit and two seconds.
    """
    check_plannable(problem)
    check_seed(seed)
    fusing = Fusing.of(fuse)
    if not offers_variants(problem):
        return _plan_order(problem, time_limit_s, seed, observer, fusing)
    if not variants:
        plain = fixed(problem, (0,) * problem.num_stages)
        return _plan_order(plain, time_limit_s, seed, observer, fusing)
    return plan_variants(
        problem,
        lambda p, limit, tell: _plan_order(p, limit, seed, tell, fusing),
        lambda p: quick_value(p, seed, fusing),
        time_limit_s=time_limit_s,
        observer=observer,
        fusing=fusing is not Fusing.NEVER,
    )


def _plan_order(
    problem: Problem,
    time_limit_s: float,
    seed: int,
    observer: Callable[[Progress], None] | None,
    fusing: Fusing,
) -> Solution:
    """Plan a problem without variants; the parameters are those of `plan`."""
    check_caps(problem, fusing=fusing is not Fusing.NEVER)
    incumbent = Incumbent(
        problem, best_bound(problem), time_limit_s=time_limit_s, observer=observer, fusing=fusing
    )
    blocking = blocking_send_bound(problem)
    if blocking is not None:
        incumbent.raise_bound(blocking)
    try:
        _find(incumbent, seed, time_limit_s)
    except KeyboardInterrupt:
        incumbent.interrupt()
    return incumbent.solution()


def _find(incumbent: Incumbent, seed: int, time_limit_s: float) -> None:
    """Look for orders, and for proofs in between: one part after the other until value meets bound."""
    problem, auto = incumbent.problem, incumbent.fusing is Fusing.AUTO
    actions = 3 * incumbent.instance.num_stages * incumbent.instance.num_microbatches
    level = max(1, round(time_limit_s / 10))
    try_classic(incumbent)
    try_rounds(incumbent, tries=rounds_tries(actions) * level, seed=seed)
    holding = problem.sends.holds_rank
    tries = _HOLDING_TRIES if holding else max(60, min(300, 150_000 // actions))
    try_list_schedules(incumbent, tries=tries, seed=seed)
    try_coarse(incumbent, tries=tries // 2, seed=seed)
    try_orders_of_other_mode(incumbent, seed)
    if auto:
        share = 0.9 if holding else 0.3  # under sends that hold their rank, no other search follows
        improve_fusing(incumbent, tries=fusing_tries(actions) * level, seed=seed, share=share)
    if actions <= EXACT_ACTIONS // 2 and not crossing_applies(incumbent):
        prove_exact(incumbent, seed, time_limit_s / 4)
    search(incumbent, seed, time_limit_s)
    if auto and not holding:
        tries = fusing_tries(actions) * level // 3
        improve_fusing(incumbent, tries=tries, seed=seed, share=0.3, whole=False)
    prove_exact(incumbent, seed, time_limit_s)


def try_coarse(incumbent: Incumbent, tries: int, seed: int) -> None:
    """Where ranks hold neighbouring stages, offer orders of the problem with each rank's stages as one."""
    coarse = coarse_problem(incumbent.problem)
    if coarse is None or incumbent.done:
        return
    seconds = incumbent.seconds_left / 3
    inner = Incumbent(coarse, best_bound(coarse), time_limit_s=seconds, fusing=incumbent.fusing)
    try_classic(inner)
    try_list_schedules(inner, tries=tries, seed=seed)
    for _, codes in inner.pool:
        origin = f"merged stages, {inner.origin}" if codes is inner.codes else "merged stages"
        incumbent.offer(taken_apart(codes, incumbent.problem), origin)


def try_orders_of_other_mode(incumbent: Incumbent, seed: int) -> None:
    """Where ranks have several stages, offer what is planned for the mode that `SendMode.starts_as` names."""
    problem, other = incumbent.problem, incumbent.problem.sends.starts_as
    if incumbent.done or other is None or problem.num_stages == problem.num_ranks:
        return
    problem, seconds = problem.with_(transport=other.name), incumbent.seconds_left / 2
    inner = Incumbent(problem, best_bound(problem), time_limit_s=seconds, fusing=incumbent.fusing)
    _find(inner, seed, seconds)
    for _, codes in inner.pool:
        origin = f"as if {other.name}, {inner.origin}" if codes is inner.codes else f"as if {other.name}"
        incumbent.offer(codes, origin)


def quick_value(problem: Problem, seed: int, fusing: Fusing) -> int | None:
    """Return the value of the first orders alone, to rank assignments of variants and placements."""
    incumbent = Incumbent(problem, best_bound(problem), time_limit_s=2.0, fusing=fusing)
    try_classic(incumbent)
    try_rounds(incumbent, tries=0, seed=seed)
    try_list_schedules(incumbent, tries=12, seed=seed)
    try_coarse(incumbent, tries=12, seed=seed)
    if any(len(stages) > 1 for stages in incumbent.instance.stages_of):
        scorer, rng = Scorer(incumbent.instance), random.Random(seed)
        for _, _, codes in offset_key_orders(incumbent, scorer, rng, blocks=6, dispatches=12):
            incumbent.offer(codes, "pattern")
    return incumbent.value


def search(incumbent: Incumbent, seed: int, time_limit_s: float) -> None:
    """Search beyond the first orders, with the crossing bound in between where it may end the search.

    Long problems with several stages per rank are planned short first.
    """
    instance = incumbent.instance
    if incumbent.done or incumbent.problem.sends.holds_rank:
        return
    actions = 3 * instance.num_stages * instance.num_microbatches
    level = max(1, round(time_limit_s / 10))
    long = actions > _LONG and any(len(stages) > 1 for stages in instance.stages_of)
    if long:
        _plan_short(incumbent, seed, level)
    run = Search(incumbent, Effort.of(instance, level), seed)
    run.start([codes for _, codes in incumbent.pool])
    if not long:
        run.add_offset_key_orders()
    quick_crossing_bound(incumbent, seed, time_limit_s / 12)
    reserve_s = time_limit_s * proof_share(incumbent, time_limit_s)
    run.anneal_folded(reserve_s)
    run.anneal(reserve_s)
    prove_from_below(incumbent, seed)
    prove_crossing(incumbent, seed)


def _plan_short(incumbent: Incumbent, seed: int, level: int) -> None:
    """Plan about 3 p microbatches and repeat the middle: a block that is there, or one made for it."""
    instance, p, m = incumbent.instance, incumbent.instance.num_ranks, incumbent.instance.num_microbatches
    count = 3 * p + (m - 3 * p) % _BLOCKS
    if count >= m:
        return
    problem = incumbent.problem.with_(num_microbatches=count)
    seconds = max(0.0, incumbent.seconds_left * 0.6)
    inner = Incumbent(problem, best_bound(problem), time_limit_s=seconds, fusing=incumbent.fusing)
    try_classic(inner)
    try_rounds(inner, tries=0, seed=seed)
    run = Search(inner, Effort.of(inner.instance, max(1, level // 2)), seed)
    run.start([codes for _, codes in inner.pool])
    found = run.anneal_folded(last=9)
    run.add_offset_key_orders()
    for folded in found + run.anneal_folded():
        incumbent.offer(folded.grown(m), "repeated")
    run.anneal()
    whole = Scorer(instance)
    for _, codes in inner.pool[:2]:
        for stretched in stretch(instance, codes, count, whole, lambda: incumbent.seconds_left <= 0):
            incumbent.offer(stretched, "stretched")
