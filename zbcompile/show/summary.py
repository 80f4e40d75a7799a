"""The figures of a plan: what `show --json` prints and what the head of a picture says in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbcompile.formats.measured_json import Measured
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Kind, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline, simulate
from zbcompile.schedule.solution import Certificate
from zbcompile.show.baseline import Baseline, one_f_one_b
from zbcompile.show.units import TimeUnit, format_bytes, percent, time_unit

__all__ = [
    "Plan",
    "headline",
    "measured_to_json",
    "plan_of",
    "proof_line",
    "remarks",
    "to_json",
    "unit_problem",
]


@dataclass(frozen=True, slots=True)
class Plan:
    """An order with its times, its proof where there is one, and 1F1B beside it.

    has_profile : False when the costs are made up (F = B = W = 1), because the file has none.
    """

    timeline: Timeline
    baseline: Baseline
    certificate: Certificate | None
    origin: str
    has_profile: bool

    @property
    def unit(self) -> TimeUnit:
        """The unit in which this plan's times read well."""
        return time_unit(self.timeline.makespan_ns, abstract=not self.has_profile)


def unit_problem(schedule: Schedule) -> Problem:
    """The problem that stands in for a missing profile: every F, B and W takes 1, a BW 2, links nothing."""
    profile = Profile.uniform(StageCost.simple(1, 1, 1, 0, 0), schedule.num_stages, source="no profile")
    return Problem(profile, schedule.placement, schedule.num_microbatches)


def plan_of(file: ScheduleFile, timeline: Timeline | None = None) -> Plan:
    """Time a schedule file's order, unless its times are known. Raises `CheckError` when it cannot run."""
    problem = file.problem or unit_problem(file.schedule)
    return Plan(
        timeline or simulate(file.schedule, problem),
        one_f_one_b(problem),
        file.certificate,
        file.origin,
        file.problem is not None,
    )


def remarks(plan: Plan) -> list[str]:
    """What a glance finds wrong with an order that can run: work left out, caps exceeded."""
    schedule, problem = plan.timeline.schedule, plan.timeline.problem
    count = dict.fromkeys(Kind, 0)
    for row in schedule.order:
        for action in row:
            count[action.kind] += 1
    found, whole = [], problem.num_stages * problem.num_microbatches
    fused = count[Kind.FULL_BACKWARD]
    for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        given = count[kind] + (0 if kind is Kind.FORWARD else fused)
        if given != whole:
            found.append(f"the order has {given} of {whole} {kind.value} actions")
    for rank, (peak, cap) in enumerate(zip(plan.timeline.peak_bytes, problem.caps, strict=True)):
        if cap is not None and peak > cap:
            found.append(f"rank {rank} holds {format_bytes(peak)}, over its cap of {format_bytes(cap)}")
    return found


def headline(plan: Plan) -> str:
    """The gain over 1F1B at the same memory, in words; says so when there is none."""
    timeline, reference = plan.timeline, plan.baseline.timeline
    value, objective = timeline.value_ns, timeline.problem.objective
    gain = plan.baseline.gain(value)
    if reference is None or gain is None:
        return f"1F1B does not apply: {plan.baseline.why or 'it takes no time'}"
    capped = any(cap is not None for cap in timeline.problem.caps)
    at = "within the same cap" if capped else "with no cap on memory"
    if 0 < plan.baseline.in_flight < min(timeline.schedule.num_ranks, timeline.schedule.num_microbatches):
        at += f" ({plan.baseline.in_flight} in flight)"
    sides = f"{objective} {plan.unit.text(value)} against {plan.unit.text(reference.value_ns)}"
    if abs(gain) < 0.0005:
        return f"as long as 1F1B {at}: {sides}"
    if gain < 0:
        return f"{percent(-gain)} longer than 1F1B {at}: {sides}; zero bubble does not pay here"
    return f"{percent(gain)} shorter than 1F1B {at}: {sides}"


def proof_line(plan: Plan) -> str:
    """What is proved about the value."""
    timeline, certificate = plan.timeline, plan.certificate
    if certificate is None:
        return "no certificate: nothing is proved about this order"
    if certificate.value_ns != timeline.value_ns:
        return (
            f"the file's certificate speaks of {plan.unit.text(certificate.value_ns)},"
            f" this order takes {plan.unit.text(timeline.value_ns)}: it proves nothing here"
        )
    if certificate.is_optimal:
        return f"proved optimal ({certificate.method}): no order of this problem is shorter"
    return (
        f"{certificate.status}: no order is shorter than {plan.unit.text(certificate.bound_ns)}"
        f" ({certificate.method})"
    )


def to_json(plan: Plan) -> dict[str, object]:
    """All figures as plain values. Shares are fractions, times ns, memory bytes."""
    timeline, problem = plan.timeline, plan.timeline.problem
    certificate, reference = plan.certificate, plan.baseline.timeline
    peaks = timeline.peak_bytes
    return {
        "ranks": problem.num_ranks,
        "stages": problem.num_stages,
        "microbatches": problem.num_microbatches,
        "placement": problem.placement.name,
        "objective": problem.objective,
        "transport": problem.transport,
        "has_profile": plan.has_profile,
        "origin": plan.origin,
        "span_ns": timeline.span_ns,
        "makespan_ns": timeline.makespan_ns,
        "bubble_of_span": timeline.bubble("span"),
        "bubble_of_makespan": timeline.bubble("makespan"),
        "certificate": None
        if certificate is None
        else {
            "objective": certificate.objective,
            "value_ns": certificate.value_ns,
            "bound_ns": certificate.bound_ns,
            "gap": certificate.gap,
            "status": certificate.status,
            "method": certificate.method,
            "speaks_of_this_order": certificate.value_ns == timeline.value_ns,
        },
        "one_f_one_b": {
            "value_ns": None if reference is None else reference.value_ns,
            "in_flight": plan.baseline.in_flight,
            "gain": plan.baseline.gain(timeline.value_ns),
            "why_not": plan.baseline.why,
        },
        "per_rank": [
            {
                "rank": rank,
                "stages": list(problem.placement.stages_of(rank)),
                "actions": len(timeline.schedule.order[rank]),
                "busy_ns": timeline.busy_ns(rank),
                "span_ns": timeline.rank_span[rank],
                "peak_bytes": peaks[rank] if plan.has_profile else None,
                "cap_bytes": problem.caps[rank],
            }
            for rank in range(problem.num_ranks)
        ],
    }


def measured_to_json(plan: Plan, measured: Measured) -> dict[str, object]:
    """Planned against measured: the whole step and the mean of every kind, in ns."""
    rows = [
        {"kind": kind.value, "planned_ns": planned, "measured_ns": real, "count": count}
        for kind, planned, real, count in kind_means(plan.timeline, measured)
    ]
    return {
        "source": measured.source,
        "makespan_ns": measured.makespan_ns,
        "over_plan": measured.makespan_ns / plan.timeline.makespan_ns - 1
        if plan.timeline.makespan_ns
        else None,
        "kinds": rows,
    }


def kind_means(timeline: Timeline, measured: Measured) -> Sequence[tuple[Kind, int, int, int]]:
    """(kind, mean planned ns, mean measured ns, count) for the compute kinds that both have."""
    planned: dict[Kind, list[int]] = {}
    real: dict[Kind, list[int]] = {}
    for rank, k, action in timeline.schedule.actions():
        planned.setdefault(action.kind, []).append(timeline.end[rank][k] - timeline.start[rank][k])
    for row in measured.ranks:
        for action, start, end in row:
            real.setdefault(action.kind, []).append(end - start)
    return [
        (kind, sum(planned[kind]) // len(planned[kind]), sum(real[kind]) // len(real[kind]), len(real[kind]))
        for kind in Kind
        if kind in planned and kind in real and kind.is_compute
    ]


def memory_text(plan: Plan, rank: int) -> str:
    """``3.2 of 4 GiB`` for one rank, or nothing without a profile."""
    if not plan.has_profile:
        return ""
    peak, cap = format_bytes(plan.timeline.peak_bytes[rank]), plan.timeline.problem.caps[rank]
    if cap is None:
        return peak
    number, unit = peak.split(" ")
    limit = format_bytes(cap)
    return f"{number if limit.endswith(' ' + unit) else peak} of {limit}"
