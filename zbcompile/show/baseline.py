"""1F1B at the same memory: what every plan is held against."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline, simulate

__all__ = ["Baseline", "merge_stages", "one_f_one_b"]


@dataclass(frozen=True, slots=True)
class Baseline:
    """1F1B on the same model, ranks, links and caps; ``timeline`` is None where it cannot be had, and why.

    in_flight : microbatches that the first rank holds at most.
    """

    timeline: Timeline | None
    why: str = ""
    in_flight: int = 0

    def gain(self, value_ns: int) -> float | None:
        """By how much shorter than 1F1B a value is, as a share of 1F1B's; negative when longer."""
        if self.timeline is None or self.timeline.value_ns == 0:
            return None
        return 1.0 - value_ns / self.timeline.value_ns


def one_f_one_b(problem: Problem) -> Baseline:
    """1F1B with fused backwards (arXiv 1806.03377) under the problem's caps.

    Several stages of a rank count as one stage made of neighbouring ones. Where a cap is below what
    1F1B wants, fewer microbatches are in flight, as many as fit.
    """
    merged = merge_stages(problem)
    if merged is None:
        return Baseline(None, "its stages do not divide evenly among the ranks")
    p, m = merged.num_ranks, merged.num_microbatches
    rows: list[list[Action]] = []
    most = m
    for rank in range(p):
        headroom, saved = merged.headroom(rank), merged.profile.stages[rank].saved_bytes
        fits = m if headroom is None or saved == 0 else headroom // saved
        if fits < 1 or (headroom is not None and headroom < 0):
            return Baseline(None, f"one microbatch does not fit on rank {rank}")
        most = min(most, fits)
        rows.append(_row(rank, min(p - rank, most), m))
    first = next(k for k, action in enumerate(rows[0]) if action.kind is not Kind.FORWARD)
    return Baseline(simulate(Schedule.of(merged.placement, m, rows), merged), in_flight=first)


def _row(rank: int, warm_up: int, m: int) -> list[Action]:
    warm_up = min(warm_up, m)
    row = [Action(Kind.FORWARD, rank, i) for i in range(warm_up)]
    for i in range(m):
        row.append(Action(Kind.FULL_BACKWARD, rank, i))
        if warm_up + i < m:
            row.append(Action(Kind.FORWARD, rank, warm_up + i))
    return row


def merge_stages(problem: Problem) -> Problem | None:
    """The same model with one stage per rank: n / p neighbours joined; None when p does not divide n."""
    profile, n, p = problem.profile, problem.num_stages, problem.num_ranks
    if n == p:
        return (
            problem
            if problem.placement == Placement.linear(p)
            else problem.with_(placement=Placement.linear(p))
        )
    if n % p:
        return None
    each = n // p
    stages = tuple(_joined(profile.stages[k * each : (k + 1) * each]) for k in range(p))
    flows: dict[tuple[int, int], Edge] = {}
    for edge in profile.edges:
        pair = edge.source // each, edge.target // each
        if pair[0] != pair[1]:
            old = flows.get(pair, Edge(*pair, has_gradient=False))
            flows[pair] = replace(
                old,
                forward_bytes=old.forward_bytes + edge.forward_bytes,
                backward_bytes=old.backward_bytes + edge.backward_bytes,
                has_gradient=old.has_gradient or edge.has_gradient,
            )
    merged = Profile(
        stages, tuple(flows.values()), profile.link, profile.links, profile.overhead_ns, profile.source
    )
    return problem.with_(profile=merged, placement=Placement.linear(p))


def _joined(stages: tuple[StageCost, ...]) -> StageCost:
    return StageCost(
        sum(s.forward_ns for s in stages),
        sum(s.backward_input_ns for s in stages),
        sum(s.backward_weight_ns for s in stages),
        sum(s.full_backward_ns for s in stages),
        sum(s.saved_bytes for s in stages),
        sum(s.saved_for_weight_bytes for s in stages),
        sum(s.static_bytes for s in stages),
    )
