"""Changes of a step for `zbcompile.planner.what_if`: memory, links, fusing, placement, microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from zbcompile.errors import UsageError
from zbcompile.planner.core.instance import Fusing
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.problem import Problem

__all__ = [
    "Change",
    "all_fused",
    "all_split",
    "at_least_caps",
    "by_rule_of_thumb",
    "faster_link",
    "more_activations",
    "more_memory",
    "more_microbatches",
    "placed",
    "slower_link",
    "with_barrier",
    "without_barrier",
    "without_caps",
]

_AMOUNTS = tuple(cost.name for cost in fields(StageCost) if cost.type == "int")


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a step.

    Attributes
    ----------
    name
        What is changed, for people.
    problem
        The step with the change.
    fusing
        Which backwards may be fused.
    by_rule
        Whether to take the rule of thumb for fusing in place of a search.
    same_actions
        Whether orders of the step as it is are orders of the changed one, too.
    """

    name: str
    problem: Problem
    fusing: Fusing = Fusing.AUTO
    by_rule: bool = False
    same_actions: bool = True


def _bytes_of_one(problem: Problem, rank: int) -> int:
    """Return the bytes that one microbatch holds between F and B on all stages of a rank."""
    return sum(problem.profile.stages[s].saved_bytes for s in problem.placement.stages_of(rank))


def _caps(problem: Problem) -> Sequence[int | None]:
    if all(cap is None for cap in problem.caps):
        raise UsageError("memory has no cap here: more of it changes nothing", fix="give --cap")
    return problem.caps


def more_memory(problem: Problem, name: str, more: Callable[[int], int]) -> Change:
    """Give every rank that has a cap another one."""
    caps = tuple(None if cap is None else more(cap) for cap in _caps(problem))
    return Change(name, problem.with_(caps=caps))


def more_activations(problem: Problem, count: int) -> Change:
    """Give every rank room for the activations of some more microbatches."""
    caps = tuple(
        None if cap is None else cap + count * _bytes_of_one(problem, rank)
        for rank, cap in enumerate(_caps(problem))
    )
    return Change(f"memory for {count} more microbatch{'es' * (count > 1)}", problem.with_(caps=caps))


def at_least_caps(problem: Problem) -> Change:
    """Give every rank the least bytes that any order runs with there."""
    caps = (least_headroom(problem, r) + problem.static_bytes(r) for r in range(problem.num_ranks))
    return Change("the least cap on every rank", problem.with_(caps=tuple(caps)))


def without_caps(problem: Problem) -> Change:
    """Give every rank all memory that it wants."""
    _caps(problem)
    return Change("no cap on memory", problem.with_(caps=(None,) * problem.num_ranks))


def with_barrier(problem: Problem) -> Change:
    """Let all ranks meet between two steps, for a norm of all gradients: the makespan counts."""
    return Change("with a barrier (makespan)", problem.with_(objective="makespan"))


def without_barrier(problem: Problem, snapshot: int | None = None) -> Change:
    """Let no rank wait for others before its update: the span counts, and what can undo an update is held.

    Parameters
    ----------
    snapshot
        Bytes that a rank holds for that. Default: a copy of the parameters and of two tensors of optimizer
        state for each, as large as the gradients that the profile states.

    Raises
    ------
    UsageError
        The profile does not state the bytes of gradients.
    """
    stages, caps = problem.profile.stages, []
    for rank, cap in enumerate(problem.caps):
        own = [stages[s] for s in problem.placement.stages_of(rank)]
        unstated = any(stage.backward_weight_ns and not stage.gradient_bytes for stage in own)
        if cap is not None and snapshot is None and unstated:
            raise UsageError(
                "the profile does not say how large the gradients are, and so not what undoes an update",
                where=f"rank {rank}",
                fix="write barrier=none:2GiB, with the bytes that a rank holds for that",
            )
        held = 3 * sum(stage.gradient_bytes for stage in own) if snapshot is None else snapshot
        caps.append(None if cap is None else max(0, cap - held))
    return Change("without a barrier (span)", problem.with_(objective="span", caps=tuple(caps)))


def faster_link(problem: Problem, factor: int, pair: tuple[int, int] | None = None) -> Change:
    """Divide the latency of a link, or of all links, and multiply its bandwidth."""

    def faster(link: Link) -> Link:
        return Link(link.latency_ns // factor, link.bytes_per_second * factor)

    who = "all links" if pair is None else f"the link {pair[0]}-{pair[1]}"
    return _relinked(problem, f"{who} {factor} times as fast", faster, pair)


def slower_link(problem: Problem, more_ns: int, how: str, pair: tuple[int, int] | None = None) -> Change:
    """Add to the latency of a link, or of all links.

    Parameters
    ----------
    how
        The time as it was written.
    """

    def slower(link: Link) -> Link:
        return replace(link, latency_ns=link.latency_ns + more_ns)

    who = "all links" if pair is None else f"the link {pair[0]}-{pair[1]}"
    return _relinked(problem, f"{who} slower by {how}", slower, pair)


def _relinked(
    problem: Problem, name: str, change: Callable[[Link], Link], pair: tuple[int, int] | None
) -> Change:
    """Change one link, in both directions, or all."""
    profile, links = problem.profile, dict(problem.profile.links)
    rank_of = problem.placement.rank_of
    used = {(rank_of[e.source], rank_of[e.target]) for e in profile.edges}
    used |= {(b, a) for a, b in used}
    if pair is None:
        links = {ranks: change(link) for ranks, link in links.items()}
        changed = replace(profile, link=change(profile.link), links=tuple(links.items()))
    else:
        if pair not in used or pair[0] == pair[1]:
            raise UsageError(f"nothing is sent between ranks {pair[0]} and {pair[1]}")
        for ranks in (pair, pair[::-1]):
            links[ranks] = change(profile.link_between(*ranks))
        changed = replace(profile, links=tuple(links.items()))
    return Change(name, problem.with_(profile=changed))


def all_split(problem: Problem) -> Change:
    """Split every backward."""
    return Change("every backward split", problem, Fusing.NEVER)


def all_fused(problem: Problem) -> Change:
    """Fuse every backward."""
    return Change("no backward split", problem, Fusing.ALWAYS)


def by_rule_of_thumb(problem: Problem) -> Change:
    """Split by the rule of thumb: on rank r the first r and the last p - r microbatches, none on rank 0."""
    if problem.num_stages != problem.num_ranks:
        raise UsageError("the rule of thumb for fusing is for one stage per rank")
    return Change("split by the rule of thumb", problem, by_rule=True)


def more_microbatches(problem: Problem, count: int) -> Change:
    """Run some more microbatches."""
    changed = problem.with_(num_microbatches=problem.num_microbatches + count)
    return Change(f"{count} more microbatch{'es' * (count > 1)}", changed, same_actions=False)


def placed(problem: Problem, name: str, placement: Placement) -> Change:
    """Put the stages on the same ranks in another way; halves of the stages where there are twice as many."""
    if placement.num_ranks != problem.num_ranks:
        raise UsageError(
            "another placement is on the same ranks", needed=problem.num_ranks, given=placement.num_ranks
        )
    if placement == problem.placement:
        raise UsageError(f"the stages are placed so already: {name}")
    profile, cut = problem.profile, ""
    if placement.num_stages == 2 * problem.num_stages:
        profile, cut = _halved(profile), ", stages in halves"
    return Change(
        f"placement {name}{cut}", problem.with_(profile=profile, placement=placement), same_actions=False
    )


def _halved(profile: Profile) -> Profile:
    """Cut every stage of a chain in two equal halves; what passes between them is what goes on to the next.

    Raises
    ------
    UsageError
        The stages are no chain.
    """
    count = profile.num_stages
    edges = {(edge.source, edge.target): edge for edge in profile.edges}
    if count < 2 or set(edges) != {(s, s + 1) for s in range(count - 1)}:
        raise UsageError("only the stages of a chain can be cut in halves")
    stages, cut = [], []
    for s, stage in enumerate(profile.stages):
        stages += [_half(stage, 0), _half(stage, 1)]
        onward = edges[(s, s + 1) if s < count - 1 else (s - 1, s)]
        cut.append(replace(onward, source=2 * s, target=2 * s + 1))
        if s < count - 1:
            cut.append(replace(onward, source=2 * s + 1, target=2 * s + 2))
    return replace(profile, stages=tuple(stages), edges=tuple(cut))


def _half(stage: StageCost, which: int) -> StageCost:
    """Return half of a stage: of odd numbers the second half has one more."""
    amounts = {name: (getattr(stage, name) + which) // 2 for name in _AMOUNTS}
    return replace(stage, **amounts, variants=tuple(_half(variant, which) for variant in stage.variants))
