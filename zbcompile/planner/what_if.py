"""What if: the same step with something changed, planned with the same effort as the step as it is.

The step as it is is planned again first, so that a row differs from it by the change
(`zbcompile.planner.changes`) and not by the effort. Wherever an order that is known already fits the changed
step, it is timed there too: more memory or a faster link never reads as a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zbcompile.errors import CheckError, InfeasibleError, NoOrderError, UsageError
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.changes import Change
from zbcompile.planner.core.instance import Fusing, Instance, to_schedule
from zbcompile.planner.incumbent import Progress
from zbcompile.planner.plan import plan
from zbcompile.planner.starts.fused_patterns import some_by_rule
from zbcompile.schedule.check import checked_times
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.problem import Objective, Problem

__all__ = ["Outcome", "Worth", "activation_worth", "what_if"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a change, or of the step as it is.

    Attributes
    ----------
    name
        What was changed.
    value_ns
        The best value found; None if nothing fits.
    bound_ns
        No order of the changed step is shorter; None if nothing fits.
    lineage
        How the order came to be.
    why_not
        Why nothing fits.
    schedule
        The order.
    objective
        What the value is: the span, or the makespan.
    """

    name: str
    value_ns: int | None
    bound_ns: int | None
    lineage: tuple[str, ...] = ()
    why_not: str = ""
    schedule: Schedule | None = None
    objective: Objective = "span"

    @property
    def proved(self) -> bool:
        """Whether the value meets the bound."""
        return self.value_ns is not None and self.value_ns == self.bound_ns


@dataclass(frozen=True, slots=True)
class Worth:
    """What one more activation of memory on every rank is worth, by the bound.

    Attributes
    ----------
    more_bytes
        Bytes more per rank.
    bound_ns, more_ns
        The bound as it is, and with more memory.
    formula_ns
        For equal stages in a V, the least idle time by the closed formula, where it gives the bound; else
        None.
    """

    more_bytes: tuple[int, ...]
    bound_ns: int
    more_ns: int
    formula_ns: int | None


def what_if(
    problem: Problem,
    schedule: Schedule,
    changes: Sequence[Change],
    *,
    variants: Sequence[int] = (),
    time_limit_s: float = 30.0,
    seed: int = 0,
    observer: Callable[[str, Progress], None] | None = None,
) -> Iterator[Outcome]:
    """Plan a step as it is and with each change, all with the same share of the time.

    Parameters
    ----------
    problem
        The step. Its profile may offer variants.
    schedule
        An order of it.
    changes
        The changes, made of the same problem.
    variants
        The variants that the order runs, where stages offer any.
    time_limit_s
        Seconds for all.
    seed
        Decides all random choices.
    observer
        Called with the name of the change and every `Progress`.

    Yields
    ------
    Outcome
        First the step as it is, then one per change. Ctrl-C ends the search of a row and keeps its best
        order; the caller decides whether to go on.
    """
    share = time_limit_s / (len(changes) + 1)
    known: list[Schedule] = [schedule.compute_only()]
    for change in (Change("as it is", problem), *changes):

        def tell(progress: Progress, name: str = change.name) -> None:
            if observer is not None:
                observer(name, progress)

        found = _by_rule(change, variants) if change.by_rule else _planned(change, share, seed, tell)
        if change.same_actions and not change.by_rule:
            found = _with_known(change, known, variants, found)
        if change.problem is problem and change.fusing is Fusing.AUTO and found.schedule is not None:
            known.append(found.schedule)
        yield replace(found, objective=change.problem.objective)


def _planned(change: Change, share: float, seed: int, tell: Callable[[Progress], None]) -> Outcome:
    """Plan a changed step."""
    try:
        found = plan(change.problem, time_limit_s=share, seed=seed, observer=tell, fuse=change.fusing)
    except (InfeasibleError, NoOrderError, UsageError) as error:
        return Outcome(change.name, None, None, why_not=str(error))
    certificate = found.certificate
    schedule = found.schedule if not any(found.variants) else None
    return Outcome(
        change.name, certificate.value_ns, certificate.bound_ns, certificate.lineage, schedule=schedule
    )


def _chosen(problem: Problem, variants: Sequence[int]) -> Problem:
    """Return the problem with the variants that the given order runs."""
    if not problem.profile.offers_variants:
        return problem
    return problem.with_(profile=problem.profile.choose(variants or (0,) * problem.num_stages))


def _by_rule(change: Change, variants: Sequence[int]) -> Outcome:
    """Time the forms of the rule of thumb and return the best that fits."""
    problem = _chosen(change.problem, variants)
    instance, best = Instance.of(problem), Outcome(change.name, None, None, why_not="none of its forms fits")
    for codes in some_by_rule(instance):
        schedule = to_schedule(codes, problem)
        value = _value(schedule, problem)
        if value is not None and (best.value_ns is None or value < best.value_ns):
            best = Outcome(change.name, value, None, ("rule_of_thumb",), schedule=schedule)
    return best if best.value_ns is None else replace(best, bound_ns=best_bound(problem).value_ns)


def _with_known(
    change: Change, known: Sequence[Schedule], variants: Sequence[int], found: Outcome
) -> Outcome:
    """Take a known order where it is shorter under the change than the one found for it."""
    problem = _chosen(change.problem, variants)
    for schedule in known:
        if not _allowed(schedule, change.fusing):
            continue
        value = _value(schedule, problem)
        if value is None or (found.value_ns is not None and value >= found.value_ns):
            continue
        if found.bound_ns is not None:
            found = replace(found, value_ns=value, lineage=("known",), schedule=schedule)
    return found


def _allowed(schedule: Schedule, fusing: Fusing) -> bool:
    """Return whether an order keeps to a choice of fusing."""
    kinds = {action.kind.letter for row in schedule.order for action in row}
    return (fusing is not Fusing.NEVER or "BW" not in kinds) and (
        fusing is not Fusing.ALWAYS or "W" not in kinds
    )


def _value(schedule: Schedule, problem: Problem) -> int | None:
    """Return an order's value under a problem, or None if it does not fit it."""
    try:
        return checked_times(schedule, problem).value_ns
    except CheckError:
        return None


def activation_worth(problem: Problem) -> Worth | None:
    """Return what one more activation of memory on every rank takes off the bound.

    An activation is what the smallest stage of a rank holds for one microbatch. None without caps, where
    stages offer variants, and where nothing is held.

    Notes
    -----
    For equal stages in a V with room for N activations of a stage on every rank, times f, b, w of a stage and
    lag c, the idle time of rank 0 is at least 3(p-1)(f+b+2c) + 2(f+b) - N(f+b+w) + w
    (docs/planner/proofs.md).
    """
    if None in problem.caps or problem.profile.offers_variants:
        return None
    stages = problem.profile.stages
    more = tuple(
        min(stages[s].saved_bytes for s in problem.placement.stages_of(r)) for r in range(problem.num_ranks)
    )
    if not all(more):
        return None
    caps = tuple((cap or 0) + extra for cap, extra in zip(problem.caps, more, strict=True))
    now, then = best_bound(problem), best_bound(problem.with_(caps=caps))
    return Worth(more, now.value_ns, then.value_ns, _formula(problem, now))


def _formula(problem: Problem, bound: Bound) -> int | None:
    """Return the idle time by the closed formula for equal stages in a V, if it is what the bound says."""
    p, profile = problem.num_ranks, problem.profile
    equal = len({replace(stage, name="", static_bytes=0) for stage in profile.stages}) == 1
    room = {problem.headroom(rank) for rank in range(p)}
    if problem.placement != Placement.v(p) or not equal or len(room) != 1 or problem.objective != "span":
        return None
    lags = {problem.lag_ns(e, backward=back) for e in profile.edges[: p - 1] for back in (False, True)}
    if len(lags) != 1:
        return None
    stage, extra = profile.stages[0], profile.overhead_ns
    f, b, w = (n + extra for n in (stage.forward_ns, stage.backward_input_ns, stage.backward_weight_ns))
    (headroom,), (c,) = room, lags
    count = (headroom or 0) // stage.saved_bytes
    idle = 3 * (p - 1) * (f + b + 2 * c) + 2 * (f + b) - count * (f + b + w) + w
    work = problem.num_microbatches * 2 * (f + b + w)
    return idle if idle >= 0 and work + idle == bound.value_ns else None
