"""The orders of the literature for one stage or neighbouring stages per rank, and all of them (`orders_for`).

GPipe (arXiv 1811.06965), 1F1B (arXiv 1806.03377), ZB-H1 and ZB-H2 (arXiv 2401.10241, section 2.1). Orders for
several stages per rank are in `zbcompile.planner.starts.classic_loops`.
"""

from __future__ import annotations

from zbcompile.planner.core.instance import Codes, F, Instance
from zbcompile.planner.core.unequal import alike_problem
from zbcompile.planner.starts.classic_loops import V_ORDERS, interleaved
from zbcompile.planner.starts.fused_patterns import alternate
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem

__all__ = ["gpipe", "one_f_one_b", "orders_for", "zb_h1", "zb_h2"]


def gpipe(p: int, m: int) -> Codes:
    """Return GPipe: all F's, then all backwards, fused."""
    return [alternate(d, m, warm=m) for d in range(p)]


def one_f_one_b(p: int, m: int) -> Codes:
    """Return 1F1B: p - d microbatches in flight on rank d, backwards fused."""
    return [alternate(d, m, warm=p - d) for d in range(p)]


def zb_h1(p: int, m: int) -> Codes:
    """Return ZB-H1: 1F1B with split backwards.

    d W's wait on rank d, so that every rank holds p * M_B at most.
    """
    return [alternate(d, m, warm=p - d, waiting=d, head=m) for d in range(p)]


def zb_h2(p: int, m: int) -> Codes:
    """Return ZB-H2: at most (2p - 1) * M_B.

    Rank d has 2(p - d) - 1 microbatches in flight and 2d W's waiting.
    """
    return [alternate(d, m, warm=2 * (p - d) - 1, waiting=2 * d, head=m) for d in range(p)]


def _taken_apart(codes: Codes, placement: Placement) -> Codes:
    """Return an order of one stage per rank as one of several, neighbours all of them.

    A rank's stages run their F's one after the other, their B's in reverse and their W's in reverse::

        F B W  -->  F0 F1 B1 B0 W1 W0
    """
    result: Codes = []
    for rank, row in enumerate(codes):
        stages = placement.stages_of(rank)
        result.append([(kind, s) for kind, _ in row for s in (stages if kind == F else stages[::-1])])
    return result


def orders_for(problem: Problem) -> list[tuple[str, Codes]]:
    """Return (name, order) of every published order for the problem's placement, best first.

    Caps are not looked at.
    """
    p, m, placement = problem.num_ranks, problem.num_microbatches, problem.placement
    per_rank = problem.num_stages // p
    found: list[tuple[str, Codes | None]] = []
    if placement.is_contiguous:
        makers = (("ZB-H2", zb_h2), ("ZB-H1", zb_h1), ("1F1B", one_f_one_b), ("GPipe", gpipe))
        found = [(name, _taken_apart(make(p, m), placement)) for name, make in makers]
    elif problem.num_stages == per_rank * p and placement == Placement.looped(p, per_rank):
        found = [
            ("InterleavedZeroBubble", interleaved(p, per_rank, m, zero_bubble=True)),
            ("interleaved 1F1B", interleaved(p, per_rank, m, zero_bubble=False)),
        ]
    elif placement == Placement.v(p, 2):
        instance = Instance.of(alike_problem(problem))
        found = [(name, build(instance)) for name, build in V_ORDERS]
    return [(name, codes) for name, codes in found if codes is not None]
