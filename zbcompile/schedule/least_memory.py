"""The least bytes per rank under which any order can run, and the check of the caps against them."""

from __future__ import annotations

from collections.abc import Sequence

from zbcompile.errors import InfeasibleError
from zbcompile.schedule.one_microbatch import OneMicrobatch
from zbcompile.schedule.problem import Problem

__all__ = ["check_caps", "least_headroom"]

_MOST_ASKED = 200
"""Sizes of one rank's headroom that are looked at before a lower bound is taken for the least."""


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
        branch in more ways than can be looked at, it may be less than that order needs, never more.
    """
    one = OneMicrobatch.of(problem, fusing=fusing)
    own = problem.placement.stages_of(rank)
    if len(own) == 1:
        return max(one.saved[own[0]], one.pending[own[0]])
    return _least(one, [None] * one.num_ranks, rank)[0] or 0


def _least(one: OneMicrobatch, headroom: Sequence[int | None], rank: int) -> tuple[int | None, bool]:
    """Return the least bytes of a rank with which an order fits, the others as given, and if that is certain.

    None if no number of bytes will do.
    """
    room = list(headroom)
    least = one.forced_bytes(rank)
    for _ in range(_MOST_ASKED):
        room[rank] = least
        found = one.fit(room, rank)
        if found.order is not None:
            return least, True
        if not found.searched_all:
            return least, False
        if found.next_bytes is None:
            return None, True
        least = found.next_bytes
    return least, False


def check_caps(problem: Problem, *, fusing: bool = True) -> None:
    """Check that the caps leave room for one microbatch at a time: then some order fits, else none.

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
    worst: tuple[int, int, int] | None = None
    for rank in tight:
        given = headroom[rank]
        assert given is not None
        lacking = least_headroom(problem, rank, fusing=fusing) - given
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
    alone = {r: least for r in tight if (least := _least(one, headroom, r)[0]) is not None}
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
