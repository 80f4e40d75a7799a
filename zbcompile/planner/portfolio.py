"""The portfolio: everything that planning tries, in the order in which it is tried.

`zbcompile.planner.parts.search` runs a tuple of parts until the best order meets the best bound. A part that
plans another problem first (`OtherMode`, `Short`) runs a tuple of its own on it.
"""

from __future__ import annotations

from collections.abc import Collection

from zbcompile.errors import UsageError
from zbcompile.planner.bounds.blocking_send import blocking_send_bound
from zbcompile.planner.exact.crossing_proofs import Crossing, QuickCrossing
from zbcompile.planner.exact.proofs import EXACT_ACTIONS, Exact, FromBelow
from zbcompile.planner.improve.fuse import RuleOfThumb, SplitOrFuse
from zbcompile.planner.improve.halving import Anneal, AnnealOn, Fold
from zbcompile.planner.parts import AnalyticBound, Part
from zbcompile.planner.starts.held_dispatch import HeldDispatch
from zbcompile.planner.starts.initial import Classic, OneAtATime
from zbcompile.planner.starts.list_schedules import ListSchedules
from zbcompile.planner.starts.offset_key_orders import OffsetKeyOrders
from zbcompile.planner.starts.other_problems import OtherMode, Short
from zbcompile.planner.unequal import PERMUTE

__all__ = ["NAMES", "PORTFOLIO", "QUICK", "names_to_leave_out"]

_SHORT = (
    Classic(),
    OneAtATime(),
    ListSchedules(),
    Fold(rounds=3),
    OffsetKeyOrders(always=True),
    Fold(),
    Anneal(),
)

PORTFOLIO: tuple[Part, ...] = (
    AnalyticBound("blocking_send", blocking_send_bound, where=lambda run: run.problem.sends.travel_is_work),
    Classic(),
    OneAtATime(),
    RuleOfThumb(),
    ListSchedules(),
    Exact("quick_exact", actions=EXACT_ACTIONS // 2, limit=0.25, early=True),
    OtherMode(lambda: PORTFOLIO),
    HeldDispatch(),
    SplitOrFuse(),
    Short(_SHORT),
    OffsetKeyOrders(),
    QuickCrossing(),
    Fold(),
    Anneal(),
    FromBelow(),
    Crossing(),
    SplitOrFuse("split_or_fuse_again", whole=False),
    Exact(),
    AnnealOn(EXACT_ACTIONS),
)
"""All parts. The bounds in `zbcompile.planner.bounds.analytic` are known before the first one runs."""

QUICK: tuple[Part, ...] = (
    Classic(),
    OneAtATime(),
    RuleOfThumb(),
    ListSchedules(),
    OffsetKeyOrders(always=True),
)
"""What ranks assignments of variants, in a moment each."""

NAMES = tuple(part.name for part in PORTFOLIO)
"""The names of all parts, in their order."""

_LEFT_OUT = (*NAMES, PERMUTE)
"""What can be left out of a plan."""


def names_to_leave_out(names: Collection[str]) -> frozenset[str]:
    """Return the names as a set. Raises `UsageError`, with the list, if one is no part's name."""
    unknown = sorted(set(names) - set(_LEFT_OUT))
    if unknown:
        raise UsageError(f"no part of the planner is called {unknown[0]!r}", needed=", ".join(_LEFT_OUT))
    return frozenset(names)
