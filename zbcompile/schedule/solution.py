"""What the planner returns: an order, the problem that it solves, and a certificate of how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zbcompile.errors import UsageError
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.cuts import Cuts
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.notebook import Pictured
from zbcompile.schedule.problem import Objective, Problem

__all__ = ["Certificate", "Solution"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """How good an order is, and why: enough to check the claim by hand.

    Attributes
    ----------
    objective
        What the two values are: span or makespan.
    value_ns
        Span or makespan of the order in ns, as `simulate` gives it.
    bound_ns
        Lower bound in ns: no order of this problem is shorter.
    method
        What proved the bound: ``work``, ``enclosing_pair``, ``crossing``, ``area``, ``cp_sat``, ...
    witness
        The evidence of the bound, as plain JSON values (rank, windows, pair, terms of the sum).
    lineage
        How the order came to be: the parts of the planner that made it, the first from nothing, each other
        from what the one before made (``("list_schedule", "fold", "anneal")``). Empty for an order from
        elsewhere. At most 64 names go into a file; nothing is concluded from them.

    Raises
    ------
    UsageError
        The bound exceeds the value, or is negative.
    """

    objective: Objective
    value_ns: int
    bound_ns: int
    method: str
    witness: Mapping[str, object] = field(default_factory=dict)
    lineage: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.bound_ns <= self.value_ns:
            raise UsageError(
                "a lower bound cannot exceed the value it bounds",
                needed=f"0 <= bound <= {self.value_ns} ns",
                given=self.bound_ns,
            )

    @property
    def is_optimal(self) -> bool:
        """Whether the value equals the bound."""
        return self.value_ns == self.bound_ns

    @property
    def gap(self) -> float:
        """(value - bound) / value, 0.0 when optimal."""
        return (self.value_ns - self.bound_ns) / self.value_ns if self.value_ns else 0.0

    @property
    def status(self) -> str:
        """``OPTIMAL``, or the gap in per cent, rounded up so that it never reads as less than it is."""
        if self.is_optimal:
            return "OPTIMAL"
        hundredths = -(-10_000 * (self.value_ns - self.bound_ns) // self.value_ns)
        return f"gap {hundredths // 100}.{hundredths % 100:02d} %"


@dataclass(frozen=True, slots=True)
class Solution(Pictured):
    """An order for a problem, with its certificate.

    Attributes
    ----------
    problem
        What was solved. Its profile has one variant per stage fixed.
    schedule
        The order.
    certificate
        How good the order is.
    variants
        Which variant, per stage (0: the stage itself).
    origin
        How the order was found, in words: the lineage of a planned order (``classic ZB-V > fold > anneal``),
        after the placement where that was chosen, too; ``imported`` and the like for others.
    offered
        The profile that the variants were chosen from; None where the stages offered none. A bound over all
        assignments of variants cannot be checked without it.
    cuts
        How the stages were cut out of pieces where the cuts were chosen with the order; else None.
    """

    problem: Problem
    schedule: Schedule
    certificate: Certificate
    variants: tuple[int, ...] = ()
    origin: str = ""
    offered: Profile | None = None
    cuts: Cuts | None = None
