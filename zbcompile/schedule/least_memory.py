"""The least bytes per rank under which any order can run, and the check of the caps against them."""

from __future__ import annotations

from zbcompile.errors import InfeasibleError
from zbcompile.schedule.problem import Problem

__all__ = ["check_caps", "least_headroom"]


def least_headroom(problem: Problem, rank: int, *, fusing: bool = True) -> int:
    """Return the bytes, beside its static bytes, that a rank needs for one microbatch at a time.

    The rank runs the F's of all its stages, which hold their M_B's together, then the backwards from the last
    stage to the first. A fused BW needs no more than that. A split backward turns M_B into M_W before its W
    frees it, which is more where M_W > M_B: so where fusing is allowed, such a stage fuses.

    Parameters
    ----------
    problem
        What the order is for. Caps are not looked at.
    rank
        The rank.
    fusing
        Whether backwards may be fused.

    Returns
    -------
    int
        The bytes. No order needs less if every F of the rank comes before its first B, as in any chain of
        stages.
    """
    stages = [problem.profile.stages[s] for s in problem.placement.stages_of(rank)]
    held = need = sum(stage.saved_bytes for stage in stages)
    if not fusing:
        for stage in reversed(stages):
            held -= stage.saved_bytes
            need = max(need, held + stage.saved_for_weight_bytes)
    return need


def check_caps(problem: Problem, *, fusing: bool = True) -> None:
    """Check that every rank has headroom for one microbatch at a time.

    Parameters
    ----------
    problem
        The problem with its caps.
    fusing
        Whether backwards may be fused.

    Raises
    ------
    InfeasibleError
        A cap is below what `least_headroom` and the static bytes need; names the rank that lacks most and
        the least cap that works there.
    """
    worst: tuple[int, int, int] | None = None
    for rank, cap in enumerate(problem.caps):
        if cap is None:
            continue
        least = least_headroom(problem, rank, fusing=fusing) + problem.static_bytes(rank)
        lacking = least - cap
        if lacking > 0 and (worst is None or lacking > worst[0]):
            worst = (lacking, rank, least)
    if worst is not None:
        _, rank, least = worst
        raise InfeasibleError(
            f"no order fits: one microbatch alone needs {least} bytes on rank {rank}",
            where=f"rank {rank}",
            needed=least,
            given=problem.caps[rank],
            fix=f"raise the cap of rank {rank} to {least} bytes, or offer a variant that saves less",
        )
