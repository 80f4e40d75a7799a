"""The explanation of an order as plain values: what ``zbcompile explain --json`` prints.

Times are in ns, memory in bytes, shares are fractions, actions are written as in a schedule file.
docs/howto/questions.md lists the fields.
"""

from __future__ import annotations

from dataclasses import asdict

from zbcompile.formats.schedule_json import action_to
from zbcompile.schedule.ir import Action
from zbcompile.schedule.wait_roots import Link
from zbcompile.show.bubbles import Bubble, Moment
from zbcompile.show.explain import Explanation, Real
from zbcompile.show.rank_facts import RankFacts

__all__ = ["explanation_json"]

_FORMAT, _VERSION = "zbcompile.explanation", 1


def explanation_json(found: Explanation) -> dict[str, object]:
    """Return an explanation as plain values, with the name and the version of its format."""
    timeline, problem = found.timeline, found.problem
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "objective": problem.objective,
        "transport": problem.transport,
        "has_profile": found.has_costs,
        "unsteady": [asdict(spread) for spread in problem.profile.unsteady],
        "value_ns": timeline.value_ns,
        "span_ns": timeline.span_ns,
        "makespan_ns": timeline.makespan_ns,
        "certificate": _proof(found),
        "deciding_ranks": list(found.deciding),
        "critical_path": [
            {
                "rank": s.rank,
                "from_ns": s.start_ns,
                "to_ns": s.end_ns,
                "first": action_to(s.first),
                "last": action_to(s.last),
            }
            for s in found.path
        ],
        "memory_binds_on": list(found.tight),
        "least_cap_bytes": None if found.least_caps is None else max(found.least_caps),
        "least_cap_works": found.least_cap_works,
        "per_rank": [_rank(found, facts) for facts in found.ranks],
        "bubbles": [_bubble(bubble) for bubble in found.bubbles],
        "moments": [_moment(moment) for moment in found.moments],
        "measured": None if found.measured is None else _measured(found.measured),
    }


def _proof(found: Explanation) -> dict[str, object] | None:
    proof, certificate = found.proof, found.file.certificate
    if proof is None or certificate is None:
        return None
    return {
        "status": certificate.status if proof.fault is None else None,
        "method": certificate.method,
        "bound_ns": certificate.bound_ns,
        "claim": proof.claim,
        "reason": proof.reason,
        "sum": list(proof.sum_lines),
        "fault": None if proof.fault is None else str(proof.fault),
    }


def _rank(found: Explanation, facts: RankFacts) -> dict[str, object]:
    peak, splits, rank = facts.peak, facts.splits, facts.rank
    return {
        "rank": rank,
        "span_ns": facts.span_ns,
        "work_ns": facts.work_ns,
        "held_ns": facts.held_ns,
        "idle_ns": facts.idle_ns,
        "exposed_reduction_ns": facts.exposed_ns,
        "update_ns": facts.update_ns,
        "peak_bytes": peak.held_bytes if found.has_costs else None,
        "peak_at_ns": peak.at_ns if found.has_costs else None,
        "cap_bytes": found.problem.caps[rank],
        "least_cap_bytes": None if found.least_caps is None else found.least_caps[rank],
        "held_at_peak": [list(pair) for pair in peak.flying],
        "waiting_at_peak": [list(pair) for pair in peak.waiting],
        "stages": list(found.problem.placement.stages_of(rank)),
        "split": list(splits.split),
        "fused": list(splits.fused),
        "weight_ns": splits.weight_ns,
        "weight_fills_waits_ns": splits.filled_ns,
        "weight_at_end_ns": splits.last_ns,
        "weight_makes_room": splits.rooms,
        "fusing_saves_ns": splits.saved_ns,
    }


def _action(action: Action | None) -> list[object] | None:
    return None if action is None else action_to(action)


def _bubble(bubble: Bubble) -> dict[str, object]:
    pause = bubble.pause
    return {
        "rank": pause.rank,
        "from_ns": pause.start_ns,
        "to_ns": pause.end_ns,
        "held_ns": pause.held_ns,
        "before": action_to(bubble.before),
        "chain": [_link(link) for link in bubble.chain],
        "meanwhile": [
            {
                "action": action_to(other.action),
                "count": other.count,
                "why": other.why,
                "ready_ns": other.ready_ns,
                "lacking_bytes": other.lacking_bytes,
            }
            for other in bubble.others
        ],
    }


def _link(link: Link) -> dict[str, object]:
    return {
        "kind": link.kind,
        "rank": link.rank,
        "action": action_to(link.action),
        "from_ns": link.start_ns,
        "to_ns": link.end_ns,
        "until": _action(link.until),
        "until_rank": None if link.until is None else link.until_rank,
        "until_ns": link.until_ns,
        "runs_first": [action_to(action) for action in link.first],
        "since_ns": link.since_ns,
    }


def _moment(moment: Moment) -> dict[str, object]:
    running = moment.running
    return {
        "rank": moment.rank,
        "runs": None if running is None else action_to(running[0]),
        "from_ns": None if running is None else running[1],
        "to_ns": None if running is None else running[2],
        "waits": None if moment.bubble is None else _bubble(moment.bubble),
    }


def _measured(real: Real) -> dict[str, object]:
    return {
        "makespan_ns": real.makespan_ns,
        "busy_ns": list(real.busy_ns),
        "kinds": [
            {"kind": kind.value, "planned_ns": planned, "measured_ns": measured, "count": count}
            for kind, planned, measured, count in real.kinds
        ],
    }
