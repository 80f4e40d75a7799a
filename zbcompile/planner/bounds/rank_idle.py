"""Idle time that no order avoids on one rank: by memory windows, or at the start and the end.

A rank with one stage has the idle time of `zbcompile.planner.bounds.memory_window`, a rank with several that
of `zbcompile.planner.bounds.start_end_idle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zbcompile.planner.bounds.memory_window import memory_window_bound
from zbcompile.planner.bounds.start_end_idle import end_idle, pending_time, start_idle
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.paths import NO_PATH, Paths

__all__ = ["MANY_STAGES", "RankIdle", "rank_idle"]

MANY_STAGES = 128
"""Stages of one rank beyond which no idle time is looked for: its sums would take their square in time."""


@dataclass(frozen=True, slots=True)
class RankIdle:
    """Idle time that no order avoids on one rank between its first F and its last B.

    Attributes
    ----------
    rank
        The rank.
    idle_ns
        The idle time.
    first
        The stage whose F(1) is the rank's first action, or ``None`` if that is not forced.
    last
        The stage whose B(m) is the rank's last B, or ``None`` if that is not forced.
    trailing_ns
        Most time of W's that can be left when that last B ends.
    terms
        The idle time's evidence, for a `Bound.witness`.
    """

    rank: int
    idle_ns: int
    first: int | None
    last: int | None
    trailing_ns: int
    terms: Mapping[str, object]


def rank_idle(instance: Instance, paths: Paths, rank: int) -> RankIdle:
    """Return the unavoidable idle time of one rank."""
    stages = instance.stages_of[rank]
    first = next((x for x in stages if all(paths.f_to_f(x, s) != NO_PATH for s in stages)), None)
    last = next((x for x in stages if all(paths.b_to_b(s, x) != NO_PATH for s in stages)), None)
    terms: Mapping[str, object]
    if len(stages) == 1:
        chain = memory_window_bound(instance, paths.f_to_b(stages[0], stages[0]), stages[0])
        idle, terms = chain.idle_ns, chain.terms()
    elif len(stages) > MANY_STAGES:
        idle, terms = 0, {}
    else:
        start, start_terms = start_idle(instance, paths, rank)
        end, end_terms = end_idle(instance, paths, rank)
        idle, terms = start + end, {**start_terms, **end_terms}
    trailing = 0
    if last is not None:
        trailing = instance.weight[last] + pending_time(
            instance, rank, instance.headroom[rank] - instance.saved[last], last
        )
    return RankIdle(rank, idle, first, last, trailing, terms)
