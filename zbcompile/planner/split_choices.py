"""Split or fuse, asked of a whole step: no backward split, all, by the rule of thumb, and as planned.

The rule of thumb (ZB-H1 in Megatron) splits where W has a bubble to fill: on rank r > 0 the first r
microbatches and the last p - r; rank 0 fuses. What is best depends on what a fused backward saves (a
collective that it overlaps), on the travel time that W hides, and on memory; which of them decides is said by
`zbcompile.planner.split_reasons`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zbcompile.errors import CheckError, InfeasibleError, NoOrderError, UsageError
from zbcompile.planner.core.instance import Codes, Fusing, Instance, is_chain, to_codes, to_schedule
from zbcompile.planner.improve.row_changes import fuse_range, split_here
from zbcompile.planner.plan import plan_whole
from zbcompile.planner.split_reasons import RankReason, check_explainable, rank_reasons
from zbcompile.planner.starts.fused_patterns import some_by_rule
from zbcompile.schedule.check import checked_times
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.limits import check_plannable, check_seed
from zbcompile.schedule.problem import TRANSPORTS, Problem

__all__ = ["OURS", "SplitRow", "SplitTable", "split_choices"]

OURS = "zbcompile"


@dataclass(frozen=True, slots=True)
class SplitRow:
    """The best order found with one choice of splits.

    Attributes
    ----------
    name
        ``none split``, ``all split``, ``rule of thumb`` or `OURS`.
    schedule
        The order; None if none fits under the caps.
    value_ns
        Its span or makespan, as the objective says; None if none fits.
    peak_bytes
        Most bytes held, per rank.
    why_not
        Why no order fits.
    """

    name: str
    schedule: Schedule | None = None
    value_ns: int | None = None
    peak_bytes: tuple[int, ...] = ()
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class SplitTable:
    """The choices under one send mode.

    Attributes
    ----------
    problem
        What they were planned for.
    rows
        Ours comes last.
    bound_ns
        No order of the problem is shorter, whatever is split; None if nothing fits.
    reasons
        Per rank, why our order splits and fuses as it does; empty if nothing fits.
    """

    problem: Problem
    rows: tuple[SplitRow, ...]
    bound_ns: int | None
    reasons: tuple[RankReason, ...]

    @property
    def ours(self) -> SplitRow:
        """The row of our order."""
        return self.rows[-1]


def split_choices(
    problem: Problem,
    *,
    transports: Sequence[str] = TRANSPORTS,
    seconds_per_row: float = 2.0,
    seed: int = 0,
    level: int | None = None,
) -> list[SplitTable]:
    """Plan a step with each choice of splits, under each send mode.

    Stages run as they are, without variants.

    Parameters
    ----------
    problem
        The step; its own send mode is not looked at.
    transports
        Names of the send modes.
    seconds_per_row
        Time limit of every row.
    seed
        Decides all random choices.
    level
        How much to search, as `zbcompile.planner.plan.plan` takes it.

    Raises
    ------
    KeyboardInterrupt
        Ctrl-C in one of the plans.
    UsageError
        Microbatches differ in cost, or the problem is too large to plan or to say why for every rank.
    """
    if seconds_per_row < 0:
        raise UsageError("a time limit cannot be negative", given=seconds_per_row)
    if problem.microbatch_costs:
        raise UsageError(
            "choices of splits are compared for microbatches that are alike",
            where="microbatch_costs",
            fix="leave the costs of microbatches out",
        )
    check_seed(seed)
    check_explainable(problem)
    plain = problem.with_(profile=problem.profile.choose((0,) * problem.num_stages))
    tables = []
    for name in transports:
        sent = plain.with_(transport=name)
        check_plannable(sent)
        tables.append(_table(sent, seconds_per_row, seed, level))
    return tables


def _table(problem: Problem, seconds: float, seed: int, level: int | None) -> SplitTable:
    bound: int | None = None

    def planned(name: str, fusing: Fusing) -> SplitRow:
        nonlocal bound
        try:
            found = plan_whole(problem, time_limit_s=seconds, seed=seed, fuse=fusing, level=level)
        except (InfeasibleError, NoOrderError) as error:
            return SplitRow(name, why_not=str(error))
        if fusing is Fusing.AUTO:
            bound = found.certificate.bound_ns
        return _row(name, found.schedule, problem)

    none, every = planned("none split", Fusing.ALWAYS), planned("all split", Fusing.NEVER)
    known = [to_codes(row.schedule) for row in (none, every) if row.schedule is not None]
    ruled = _by_rule(problem, known)
    ours = _shortest(planned(OURS, Fusing.AUTO), none, every, ruled)
    reasons = () if ours.schedule is None else rank_reasons(to_codes(ours.schedule), problem)
    return SplitTable(problem, (none, every, ruled, ours), bound, reasons)


def _shortest(ours: SplitRow, *others: SplitRow) -> SplitRow:
    """Return our row, with the order of a shorter one where there is one: what is split is ours to choose."""
    best = ours
    for row in others:
        if row.value_ns is not None and (best.value_ns is None or row.value_ns < best.value_ns):
            best = row
    return replace(best, name=OURS)


def _row(name: str, schedule: Schedule, problem: Problem) -> SplitRow:
    timeline = checked_times(schedule, problem)
    return SplitRow(name, schedule, timeline.value_ns, timeline.peak_bytes)


def _by_rule(problem: Problem, known: Sequence[Codes]) -> SplitRow:
    """Return the best order that splits by the rule: of its patterns, and of known orders made to obey it."""
    name, best = "rule of thumb", SplitRow("rule of thumb", why_not="no order that splits by the rule fits")
    for codes in _ruled(problem, known):
        schedule = to_schedule(codes, problem)
        try:
            row = _row(name, schedule, problem)
        except CheckError:
            continue
        if best.value_ns is None or (row.value_ns is not None and row.value_ns < best.value_ns):
            best = row
    return best


def _ruled(problem: Problem, known: Sequence[Codes]) -> Iterator[Codes]:
    """Yield orders that split by the rule of thumb."""
    for codes in known:
        yield [_made_to_obey(row, rank, problem) for rank, row in enumerate(codes)]
    instance = Instance.of(problem)
    if is_chain(instance):
        yield from some_by_rule(instance)


def _made_to_obey(row: list[tuple[int, int]], rank: int, problem: Problem) -> list[tuple[int, int]]:
    """Return a rank's row with every stage's backwards split or fused as the rule says."""
    p, m = problem.num_ranks, problem.num_microbatches
    head, tail = (min(m, rank), min(m, p - rank)) if rank else (0, 0)
    changes: tuple[tuple[Callable[..., list[tuple[int, int]]], int, int], ...] = (
        (split_here, 0, head),
        (split_here, m - tail, m),
        (fuse_range, head, m - tail),
    )
    for stage in problem.placement.stages_of(rank):
        for change, low, high in changes:
            row = change(row, stage, low, high) if low < high else row
    return row
