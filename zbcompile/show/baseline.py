"""The baseline of every picture: 1F1B on the same model within the same memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbcompile.schedule.coarsen import coarsened
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.memory import uses_of
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline, simulate

__all__ = ["Baseline", "one_f_one_b", "split_apart"]


@dataclass(frozen=True, slots=True)
class Baseline:
    """1F1B on the same model, ranks, links and caps.

    Attributes
    ----------
    timeline
        Its times; None where 1F1B does not apply.
    why
        Why it does not apply, for people.
    in_flight
        Most microbatches that the first rank holds at once.
    """

    timeline: Timeline | None
    why: str = ""
    in_flight: int = 0

    def gain(self, value_ns: int) -> float | None:
        """Return how much shorter than 1F1B a value is, as a share of 1F1B's value.

        Returns
        -------
        float or None
            Negative when the value is longer; None when 1F1B does not apply or takes no time.
        """
        if self.timeline is None or self.timeline.value_ns == 0:
            return None
        return 1.0 - value_ns / self.timeline.value_ns


def one_f_one_b(problem: Problem) -> Baseline:
    """Time 1F1B with fused backwards under the problem's caps.

    With several stages per rank, neighbouring stages are joined into one stage per rank. Where a cap is below
    what 1F1B needs, as many microbatches as fit are in flight. Those that differ come in the order as given.

    Notes
    -----
    Source: arXiv 1806.03377.
    """
    n, p, m = problem.num_stages, problem.num_ranks, problem.num_microbatches
    if n % p:
        return Baseline(None, "its stages do not divide evenly among the ranks")
    if n != p and not all(cost.same_for_all_stages for cost in problem.microbatch_costs):
        return Baseline(None, "its microbatches differ stage by stage, and its stages would be joined")
    coarse = coarsened(problem, Placement(tuple(s * p // n for s in range(n))))
    largest = coarse.alike(max).profile if coarse.microbatch_costs else coarse.profile
    rows: list[list[Action]] = []
    most = m
    for rank in range(p):
        headroom, uses = coarse.headroom(rank), uses_of(largest.stages[rank])
        fits = m if headroom is None else uses.most_in_flight(headroom, m)
        if fits < 1:
            return Baseline(None, f"one microbatch does not fit on rank {rank}")
        most = min(most, fits)
        rows.append(_row(rank, min(p - rank, most), m))
    first = next(k for k, action in enumerate(rows[0]) if action.kind is not Kind.FORWARD)
    return Baseline(simulate(Schedule.of(coarse.placement, m, rows), coarse), in_flight=first)


def _row(rank: int, warmup: int, m: int) -> list[Action]:
    warmup = min(warmup, m)
    row = [Action(Kind.FORWARD, rank, i) for i in range(warmup)]
    for i in range(m):
        row.append(Action(Kind.FULL_BACKWARD, rank, i))
        if warmup + i < m:
            row.append(Action(Kind.FORWARD, rank, warmup + i))
    return row


def split_apart(schedule: Schedule) -> Schedule:
    """Return an order with every fused backward as B and W, one right after the other.

    ``0BW0  -->  0B0 0W0``. The gradient goes to the next rank before W.
    """
    rows = [
        [
            part
            for action in row
            for part in (
                (replace(action, kind=Kind.BACKWARD_INPUT), replace(action, kind=Kind.BACKWARD_WEIGHT))
                if action.kind is Kind.FULL_BACKWARD
                else (action,)
            )
        ]
        for row in schedule.compute_only().order
    ]
    return Schedule.of(schedule.placement, schedule.num_microbatches, rows)
