"""The figures of a timed order: what `show --json` prints and what the head of a picture says in words."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from zbcompile.formats.measured_json import Measured
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.schedule.communication import lowered
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.cuts import Cuts
from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.held_gradients import gradients_words, held_sets
from zbcompile.schedule.ir import Kind, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline, timeline_of
from zbcompile.schedule.solution import Certificate
from zbcompile.schedule.spread import spread_words
from zbcompile.schedule.sum_order import numbered_by_turn
from zbcompile.show.baseline import Baseline, one_f_one_b
from zbcompile.show.units import TimeUnit, format_bytes, found_by, percent, time_unit

__all__ = [
    "Proof",
    "Summary",
    "cuts_line",
    "gradients_line",
    "headline",
    "measured_to_json",
    "origin_words",
    "proof_line",
    "remarks",
    "spread_line",
    "summarize",
    "timeline_remarks",
    "to_json",
    "unit_problem",
]


class Proof(enum.Enum):
    """What a certificate proves about an order.

    Attributes
    ----------
    ABSENT
        There is no certificate.
    OTHER_VALUE
        The certificate states another value than the order has: it proves nothing about this order.
    OPTIMAL
        No order is shorter.
    GAP
        No order is shorter than the bound, which is below the value.
    """

    ABSENT = enum.auto()
    OTHER_VALUE = enum.auto()
    OPTIMAL = enum.auto()
    GAP = enum.auto()


@dataclass(frozen=True, slots=True)
class Summary:
    """An order with its times, its certificate and 1F1B beside it.

    Attributes
    ----------
    timeline
        The order and its times.
    baseline
        1F1B under the same problem.
    certificate
        The certificate of the file; None when it has none.
    origin
        How the order was found, for people.
    has_profile
        False when the file has no costs, so that the times are those of F = B = W = 1.
    cuts
        How the stages were cut where that was chosen with the order; else None.
    graph
        The event graph that gave the times, where it is at hand.
    """

    timeline: Timeline
    baseline: Baseline
    certificate: Certificate | None
    origin: str
    has_profile: bool
    cuts: Cuts | None = None
    graph: EventGraph | None = field(default=None, compare=False, repr=False)

    def event_graph(self) -> EventGraph:
        """Return the event graph of the order, made where it is not at hand."""
        return self.graph or EventGraph(self.timeline.schedule, self.timeline.problem)

    @property
    def unit(self) -> TimeUnit:
        """The unit in which the times read well."""
        return time_unit(self.timeline.makespan_ns, abstract=not self.has_profile)

    @property
    def proof(self) -> Proof:
        """What the certificate proves about the order."""
        if self.certificate is None:
            return Proof.ABSENT
        if self.certificate.value_ns != self.timeline.value_ns:
            return Proof.OTHER_VALUE
        return Proof.OPTIMAL if self.certificate.is_optimal else Proof.GAP


def unit_problem(schedule: Schedule) -> Problem:
    """Return the problem to use without a profile: F, B and W take 1 each, BW takes 2, links take nothing."""
    profile = Profile.uniform(StageCost.simple(1, 1, 1, 0, 0), schedule.num_stages, source="no profile")
    return Problem(profile, schedule.placement, schedule.num_microbatches)


def summarize(file: ScheduleFile, timeline: Timeline | None = None) -> Summary:
    """Time the order of a schedule file and put its certificate and 1F1B beside it.

    Parameters
    ----------
    timeline
        The times of the order, where they are known.

    Raises
    ------
    CheckError
        The order cannot run: an action is missing, or it deadlocks.
    """
    problem = file.problem or unit_problem(file.schedule)
    graph = None
    if timeline is None:
        graph = EventGraph(lowered(file.schedule, problem), problem)
        timeline = timeline_of(graph)
    return Summary(
        timeline,
        one_f_one_b(problem),
        file.certificate,
        file.origin,
        file.problem is not None,
        file.cuts,
        graph,
    )


def remarks(summary: Summary) -> list[str]:
    """Return what is wrong with an order that can run: missing work, wrong ranks, exceeded caps."""
    return timeline_remarks(summary.timeline)


def timeline_remarks(timeline: Timeline) -> list[str]:
    """Return the same of a timed order."""
    schedule, problem = timeline.schedule, timeline.problem
    count, strangers, rank_of = dict.fromkeys(Kind, 0), 0, problem.placement.rank_of
    for rank, row in enumerate(schedule.order):
        for action in row:
            count[action.kind] += 1
            strangers += rank_of[action.stage] != rank
    found, whole = [], problem.num_stages * problem.num_microbatches
    fused = count[Kind.FULL_BACKWARD]
    for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        given = count[kind] + (0 if kind is Kind.FORWARD else fused)
        if given != whole:
            found.append(f"the order has {given} of {whole} {kind.value} actions")
    if strangers:
        found.append(f"{strangers} actions stand on another rank than their stage's")
    for rank, (peak, cap) in enumerate(zip(timeline.peak_bytes, problem.caps, strict=True)):
        if cap is not None and peak > cap:
            found.append(f"rank {rank} holds {format_bytes(peak)}, over its cap of {format_bytes(cap)}")
    return found


def headline(summary: Summary) -> str:
    """Say in words how much shorter the order is than 1F1B at the same memory, or that it is not."""
    timeline, baseline = summary.timeline, summary.baseline.timeline
    value, objective = timeline.value_ns, timeline.problem.objective
    gain = summary.baseline.gain(value)
    if baseline is None or gain is None:
        return f"1F1B does not apply: {summary.baseline.why or 'it takes no time'}"
    capped = any(cap is not None for cap in timeline.problem.caps)
    at = "within the same cap" if capped else "with no cap on memory"
    if 0 < summary.baseline.in_flight < min(timeline.schedule.num_ranks, timeline.schedule.num_microbatches):
        at += f" ({summary.baseline.in_flight} in flight)"
    sides = f"{objective} {summary.unit.text(value)} against {summary.unit.text(baseline.value_ns)}"
    if abs(gain) < 0.0005:
        return f"as long as 1F1B {at}: {sides}"
    if gain < 0:
        return f"{percent(-gain)} longer than 1F1B {at}: {sides}; zero bubble does not pay here"
    return f"{percent(gain)} shorter than 1F1B {at}: {sides}"


def proof_line(summary: Summary) -> str:
    """Say in words what is proved about the value."""
    certificate, proof = summary.certificate, summary.proof
    if certificate is None:
        return "no certificate: nothing is proved about this order"
    if proof is Proof.OTHER_VALUE:
        return (
            f"the file's certificate speaks of {summary.unit.text(certificate.value_ns)},"
            f" this order takes {summary.unit.text(summary.timeline.value_ns)}: it proves nothing here"
        )
    if proof is Proof.OPTIMAL:
        return f"proved optimal ({certificate.method}): no order of this problem is shorter"
    return (
        f"{certificate.status}: no order is shorter than {summary.unit.text(certificate.bound_ns)}"
        f" ({certificate.method})"
    )


def origin_words(summary: Summary) -> str:
    """Say which parts of the planner found the order, or what the file says of its origin."""
    certificate = summary.certificate
    if certificate is None or not certificate.lineage:
        return summary.origin
    return found_by(certificate.lineage)


def _held_sets(summary: Summary) -> tuple[int, ...]:
    """Return per stage the most sets of gradients that wait for their turn in the sum."""
    return held_sets(numbered_by_turn(summary.timeline.schedule, summary.timeline.problem))


def cuts_line(summary: Summary) -> str:
    """Say how many pieces each stage has; empty where the cuts were not chosen with the order."""
    if summary.cuts is None:
        return ""
    sizes = " ".join(map(str, summary.cuts.sizes))
    return f"cut with the order: {sizes} pieces a stage"


def gradients_line(summary: Summary) -> str:
    """Say which gradients of weights wait for their turn in the sum; empty for most orders: none."""
    return gradients_words(summary.timeline.schedule, summary.timeline.problem)


def spread_line(summary: Summary) -> str:
    """Say which measured times the order was made for were not steady; empty where all were."""
    return spread_words(summary.timeline.problem.profile.unsteady)


def to_json(summary: Summary) -> dict[str, object]:
    """Return all figures as plain values: shares as fractions, times in ns, memory in bytes."""
    timeline, problem = summary.timeline, summary.timeline.problem
    certificate, baseline = summary.certificate, summary.baseline.timeline
    peaks, held, cuts = timeline.peak_bytes, _held_sets(summary), summary.cuts
    if problem.accumulate != "order":
        held = (0,) * problem.num_stages
    return {
        "ranks": problem.num_ranks,
        "stages": problem.num_stages,
        "microbatches": problem.num_microbatches,
        "microbatches_differ": bool(problem.microbatch_costs),
        "split_backwards": timeline.schedule.split_backwards[0],
        "backwards": timeline.schedule.split_backwards[1],
        "placement": problem.placement.name,
        "objective": problem.objective,
        "transport": problem.transport,
        "accumulate": problem.accumulate,
        "kept_gradients": problem.kept_gradients,
        "has_profile": summary.has_profile,
        "unsteady": [asdict(spread) for spread in problem.profile.unsteady],
        "origin": summary.origin,
        "pieces_per_stage": None if cuts is None else list(cuts.sizes),
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
            "lineage": list(certificate.lineage),
            "speaks_of_this_order": summary.proof is not Proof.OTHER_VALUE,
        },
        "one_f_one_b": {
            "value_ns": None if baseline is None else baseline.value_ns,
            "in_flight": summary.baseline.in_flight,
            "gain": summary.baseline.gain(timeline.value_ns),
            "why_not": summary.baseline.why,
        },
        "per_rank": [
            {
                "rank": rank,
                "stages": list(problem.placement.stages_of(rank)),
                "actions": len(timeline.schedule.order[rank]),
                "busy_ns": timeline.busy_ns(rank),
                "span_ns": timeline.rank_span[rank],
                "peak_bytes": peaks[rank] if summary.has_profile else None,
                "cap_bytes": problem.caps[rank],
                "waiting_gradients": [held[s] for s in problem.placement.stages_of(rank)],
            }
            for rank in range(problem.num_ranks)
        ],
    }


def measured_to_json(summary: Summary, measured: Measured) -> dict[str, object]:
    """Return planned against measured in ns: the whole step and the mean of every kind."""
    rows = [
        {"kind": kind.value, "planned_ns": planned, "measured_ns": real, "count": count}
        for kind, planned, real, count in kind_means(summary.timeline, measured)
    ]
    return {
        "source": measured.source,
        "makespan_ns": measured.makespan_ns,
        "over_plan": measured.makespan_ns / summary.timeline.makespan_ns - 1
        if summary.timeline.makespan_ns
        else None,
        "kinds": rows,
    }


def kind_means(timeline: Timeline, measured: Measured) -> Sequence[tuple[Kind, int, int, int]]:
    """Return (kind, mean planned ns, mean measured ns, count) of the compute kinds that both have."""
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


def memory_text(summary: Summary, rank: int) -> str:
    """Write a rank's peak and cap, such as ``3.2 of 4 GiB``; empty without a profile."""
    if not summary.has_profile:
        return ""
    peak, cap = format_bytes(summary.timeline.peak_bytes[rank]), summary.timeline.problem.caps[rank]
    if cap is None:
        return peak
    number, unit = peak.split(" ")
    limit = format_bytes(cap)
    return f"{number if limit.endswith(' ' + unit) else peak} of {limit}"
