"""Every published order for a profile, and ours under the same caps and at the memory of each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbcompile.errors import CheckError, InfeasibleError, UsageError
from zbcompile.planner.core.instance import to_schedule
from zbcompile.planner.plan import plan_whole
from zbcompile.planner.starts.classic import orders_for
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.limits import MOST_COMPARED_STAGES, check_plannable, check_seed
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.speeds import on_ranks

__all__ = ["WITHOUT_ZERO_BUBBLE", "Comparison", "compare", "verdict"]

WITHOUT_ZERO_BUBBLE = ("1F1B", "GPipe", "interleaved 1F1B")
"""Orders without zero bubble: what a user would run otherwise."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One order under the problem's costs; bytes include static bytes.

    Attributes
    ----------
    name, placement, objective
        What the order is called, its placement's name, and the objective.
    span_ns, makespan_ns
        Its times.
    bubble
        1 - work of the busiest rank / value of the problem's objective.
    peak_bytes
        Most bytes held, per rank.
    fits
        Whether it stays under the problem's caps.
    ours_ns
        Value of our order on the same placement with each rank's cap at this order's peak; for our own row,
        its value.
    bound_ns
        No order at that memory is shorter.
    lineage
        How our order there came to be.
    split
        How many backwards of the order are split, and how many there are.
    """

    name: str
    placement: str
    objective: str
    span_ns: int
    makespan_ns: int
    bubble: float
    peak_bytes: tuple[int, ...]
    fits: bool
    ours_ns: int
    bound_ns: int
    lineage: tuple[str, ...] = ()
    split: tuple[int, int] = (0, 0)

    @property
    def value_ns(self) -> int:
        """Span or makespan, as the objective says."""
        return self.span_ns if self.objective == "span" else self.makespan_ns

    @property
    def is_ours(self) -> bool:
        """True for the row of our own order under the problem's caps."""
        return self.name == "zbcompile"


def placements(problem: Problem) -> list[Placement]:
    """Return the problem's placement, then those of published orders for as many stages and ranks."""
    p, count = problem.num_ranks, problem.num_stages
    found = [problem.placement]
    if count % p == 0 and count > p:
        found += [Placement.looped(p, count // p)]
        found += [Placement.v(p, 2)] if count == 2 * p else []
    elif count == p:
        found += [Placement.linear(p)]
    return [placement for k, placement in enumerate(found) if placement not in found[:k]]


def compare(
    problem: Problem, *, seconds_per_row: float = 2.0, seed: int = 0, speeds: Sequence[int] = ()
) -> list[Comparison]:
    """Return all published orders that apply, and ours: first our row under the problem's caps, then theirs.

    Stages run as they are, without variants, on both sides.

    Parameters
    ----------
    problem
        The problem.
    seconds_per_row
        Time limit for our order at the memory of each row; our own row gets three times as much.
    seed
        Decides all random choices.
    speeds
        Of the ranks, in millionths of that of the profile's times; empty: all as profiled.

    Raises
    ------
    InfeasibleError
        No order of the problem fits under its caps.
    KeyboardInterrupt
        Ctrl-C in one of the plans.
    UsageError
        The time limit is negative, or there are more than `MOST_COMPARED_STAGES` stages.
    """
    if seconds_per_row < 0:
        raise UsageError("a time limit cannot be negative", given=seconds_per_row)
    if problem.num_stages > MOST_COMPARED_STAGES:
        raise UsageError(
            "too many stages to compare every order for",
            needed=f"at most {MOST_COMPARED_STAGES} stages",
            given=problem.num_stages,
            fix="plan alone, or join neighbouring stages",
        )
    check_plannable(problem)
    check_seed(seed)
    problem = problem.with_(profile=problem.profile.choose((0,) * problem.num_stages))
    as_profiled = problem.profile

    def placed(placement: Placement) -> Problem:
        return problem.with_(placement=placement, profile=on_ranks(as_profiled, placement, speeds))

    problem = placed(problem.placement)
    own = plan_whole(problem, time_limit_s=3 * seconds_per_row, seed=seed)
    timeline = simulate(own.schedule, problem)
    rows = [
        Comparison(
            "zbcompile",
            problem.placement.name,
            problem.objective,
            timeline.span_ns,
            timeline.makespan_ns,
            timeline.bubble(),
            timeline.peak_bytes,
            True,
            own.certificate.value_ns,
            own.certificate.bound_ns,
            own.certificate.lineage,
            own.schedule.split_backwards,
        )
    ]
    for placement in placements(problem):
        rows.extend(_published(placed(placement), seconds_per_row, seed))
    return rows


def _published(problem: Problem, seconds: float, seed: int) -> Iterator[Comparison]:
    """Yield the published orders for the placement of a problem, without those that deadlock."""
    for name, codes in orders_for(problem):
        schedule = to_schedule(codes, problem)
        try:
            timeline = simulate(schedule, problem)
        except CheckError:  # orders for several stages per rank under batched sends
            continue
        peaks = timeline.peak_bytes
        same = problem.with_(caps=peaks)
        try:
            ours = plan_whole(same, time_limit_s=seconds, seed=seed).certificate
        except InfeasibleError:
            continue
        yield Comparison(
            name,
            problem.placement.name,
            problem.objective,
            timeline.span_ns,
            timeline.makespan_ns,
            timeline.bubble(),
            peaks,
            all(cap is None or peak <= cap for peak, cap in zip(peaks, problem.caps, strict=True)),
            ours.value_ns,
            ours.bound_ns,
            ours.lineage,
            schedule.split_backwards,
        )


def verdict(rows: list[Comparison], threshold: float = 0.01) -> str:
    """Return what the table says about zero bubble, in one sentence.

    Ours is held against the best order without zero bubble that fits the caps, else the best at any memory.
    It does not pay if it saves less than ``threshold``.
    """
    ours = next(row for row in rows if row.is_ours)
    plain = [row for row in rows if row.name in WITHOUT_ZERO_BUBBLE]
    fitting = [row for row in plain if row.fits]
    if not plain:
        return "no published order without zero bubble exists for this placement"
    best = min(fitting or plain, key=lambda row: row.value_ns)
    saved = 1 - ours.value_ns / best.value_ns
    where = "" if fitting else " (which does not fit under the caps)"
    if saved < threshold:
        return f"zero bubble does not pay here: {100 * saved:.1f} % shorter than {best.name}{where}"
    return f"{100 * saved:.1f} % shorter than {best.name}{where}"
