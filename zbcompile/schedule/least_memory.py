"""The least bytes per rank under which any order can run, and the check of the caps against them."""

from __future__ import annotations

from collections.abc import Sequence

from zbcompile.errors import InfeasibleError
from zbcompile.schedule.one_microbatch import MOST_STATES, OneMicrobatch
from zbcompile.schedule.problem import Problem

__all__ = ["check_caps", "least_headroom"]

_MOST_RANKS = 100
"""Ranks that share one search's states: each gets as many for the question of its least bytes."""


def least_headroom(problem: Problem, rank: int, *, fusing: bool = True) -> int:
    """Return the bytes, beside its static bytes, that a rank needs for one microbatch at a time.

    In a chain of stages all F's of the rank come before its first backward, so their M_B's are held together.
    Where stages branch, a backward may come before a later F.

    Parameters
    ----------
    problem
        What the order is for. Caps are not looked at.
    rank
        The rank.
    fusing
        Whether backwards may be fused. A split backward holds M_W after its B, which is more where M_W > M_B.

    Returns
    -------
    int
        The bytes: no order needs less on this rank, and one that needs no more there exists. Where stages
        branch in more ways than can be looked at, it may be less than that order needs, never more. Where
        microbatches differ, what the largest of them needs.
    """
    if problem.microbatch_costs:
        alone = (problem.with_(profile=profile, microbatch_costs=()) for profile in problem.profiles())
        return max(least_headroom(one, rank, fusing=fusing) for one in alone)
    own = problem.placement.stages_of(rank)
    return _least_alone(OneMicrobatch.of(problem, fusing=fusing), rank, own, MOST_STATES)


def _least_alone(one: OneMicrobatch, rank: int, own: Sequence[int], states: int) -> int:
    """Return the least bytes of a rank with which an order fits, the others without limit."""
    if len(own) == 1:
        return one.alone(own[0])
    least = _least(one, [None] * one.num_ranks, rank, states)
    assert least is not None
    return least


def _least(one: OneMicrobatch, headroom: Sequence[int | None], rank: int, states: int) -> int | None:
    """Return the least bytes of a rank with which an order fits, the others as given.

    Or a number below it, if it is not found in so many states. None if no number of bytes will do.
    """
    room = list(headroom)
    room[rank] = one.forced_bytes(rank)
    while True:
        found = one.fit(room, rank, states)
        states -= found.states
        if found.order is not None or not found.searched_all or states <= 0:
            return room[rank]
        if found.next_bytes is None:
            return None
        room[rank] = found.next_bytes


def check_caps(problem: Problem, *, fusing: bool = True) -> None:
    """Check that the caps leave room for one microbatch at a time: then some order fits, else none.

    Where microbatches differ, for each of them.

    Parameters
    ----------
    problem
        The problem with its caps.
    fusing
        Whether backwards may be fused.

    Raises
    ------
    InfeasibleError
        No order fits; names the rank that lacks most and the least cap that works there. Or none was found
        among stages that branch in very many ways; names a cap that works.
    """
    if problem.microbatch_costs:
        for profile in problem.profiles():
            check_caps(problem.with_(profile=profile, microbatch_costs=()), fusing=fusing)
        return
    one = OneMicrobatch.of(problem, fusing=fusing)
    headroom = [problem.headroom(rank) for rank in range(problem.num_ranks)]
    simple = one.peaks(one.forwards_first())
    tight = [
        rank
        for rank, (given, needed) in enumerate(zip(headroom, simple, strict=True))
        if given is not None and given < needed
    ]
    if not tight:
        return
    share = MOST_STATES // min(len(tight), _MOST_RANKS)
    worst: tuple[int, int, int] | None = None
    for rank in tight:
        given = headroom[rank]
        assert given is not None
        lacking = _least_alone(one, rank, problem.placement.stages_of(rank), share) - given
        if lacking > 0 and (worst is None or lacking > worst[0]):
            worst = (lacking, rank, lacking + given)
    if worst is not None:
        _, rank, needed = worst
        raise _refused(problem, rank, needed, f"one microbatch alone needs {{}} bytes on rank {rank}")
    found = one.fit(headroom)
    if found.order is not None:
        return
    if not found.searched_all:
        rank = max(tight, key=lambda r: simple[r] - (headroom[r] or 0))
        text = f"none found in {found.states} beginnings; all forwards first need {{}} bytes on rank {rank}"
        raise _refused(problem, rank, simple[rank], text)
    alone = {r: least for r in tight if (least := _least(one, headroom, r, share)) is not None}
    rank = min(alone, key=lambda r: (alone[r] - (headroom[r] or 0), r), default=tight[0])
    names = " and ".join(map(str, tight))
    text = f"the caps of ranks {names} leave no room together; rank {rank} needs {{}} bytes"
    raise _refused(problem, rank, alone.get(rank, simple[rank]), text)


def _refused(problem: Problem, rank: int, least: int, text: str) -> InfeasibleError:
    """Return the error of a cap that is too low; ``text`` takes the least cap."""
    needed = least + problem.static_bytes(rank)
    return InfeasibleError(
        "no order fits: " + text.format(needed),
        where=f"rank {rank}",
        needed=needed,
        given=problem.caps[rank],
        fix=f"raise the cap of rank {rank} to {needed} bytes, or offer a variant that saves less",
    )
