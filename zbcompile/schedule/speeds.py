"""Ranks of different speed: what a stage costs on the rank that runs it.

A speed is a whole number of millionths of the speed that a profile's times are for. A stage's F, B, W and BW
take their time divided by its rank's speed, rounded up to a whole nanosecond. Bytes, links and the host
overhead stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from zbcompile.errors import UsageError
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement

__all__ = ["AS_PROFILED", "on_ranks", "relative", "speed_words", "speeds_of", "stage_at"]

AS_PROFILED = 1_000_000
"""The speed that the profile's times are for."""

_LOWEST, _HIGHEST = 1e-3, 1e3


def speeds_of(given: Sequence[float] | None, num_ranks: int | None = None) -> tuple[int, ...]:
    """Return the speeds of ranks in millionths; empty where none are given.

    Parameters
    ----------
    given
        One positive number per rank: 1 is the speed that the profile's times are for, 0.5 takes twice as
        long.
    num_ranks
        How many there must be; None: not known yet.

    Raises
    ------
    UsageError
        A speed is no number from 0.001 to 1000, or their count is wrong.
    """
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UsageError(
            "the speed of a rank is a number, and speeds a list of one per rank", given=repr(given)
        )
    numbers = tuple(given)
    for rank, speed in enumerate(numbers):
        if (
            isinstance(speed, bool)
            or not isinstance(speed, int | float)
            or not math.isfinite(speed)
            or not _LOWEST <= speed <= _HIGHEST
        ):
            raise UsageError(
                "the speed of a rank is a number, 1 for that of the profile",
                where=f"rank {rank}",
                needed=f"{_LOWEST} to {_HIGHEST:g}",
                given=repr(speed)[:40],
            )
    if num_ranks is not None and len(numbers) != num_ranks:
        raise UsageError("one speed per rank", needed=num_ranks, given=len(numbers))
    return tuple(round(speed * AS_PROFILED) for speed in numbers)


def relative(speeds: Sequence[int]) -> tuple[int, ...]:
    """Return speeds for times that rank 0 takes: each by rank 0's, to a millionth."""
    return tuple(round(speed * AS_PROFILED / speeds[0]) for speed in speeds)


def stage_at(stage: StageCost, speed: int) -> StageCost:
    """Return what a stage and its variants cost at a speed in millionths."""
    if speed == AS_PROFILED:
        return stage

    def at(time_ns: int) -> int:
        return -(-time_ns * AS_PROFILED // speed)

    return replace(
        stage,
        forward_ns=at(stage.forward_ns),
        backward_input_ns=at(stage.backward_input_ns),
        backward_weight_ns=at(stage.backward_weight_ns),
        full_backward_ns=at(stage.full_backward_ns),
        update_ns=at(stage.update_ns),
        variants=tuple(stage_at(variant, speed) for variant in stage.variants),
    )


def on_ranks(profile: Profile, placement: Placement, speeds: Sequence[int]) -> Profile:
    """Return the profile with the times that the stages take on their ranks.

    Parameters
    ----------
    speeds
        Per rank, in millionths; empty: all as profiled.

    Raises
    ------
    UsageError
        There is not one speed per rank.
    """
    if speeds and len(speeds) != placement.num_ranks:
        raise UsageError("one speed per rank", needed=placement.num_ranks, given=len(speeds))
    if all(speed == AS_PROFILED for speed in speeds):
        return profile
    stages = zip(profile.stages, placement.rank_of, strict=True)
    source = f"{profile.source}; {speed_words(speeds)}".removeprefix("; ")
    return replace(profile, stages=tuple(stage_at(s, speeds[r]) for s, r in stages), source=source)


def speed_words(speeds: Sequence[int]) -> str:
    """Return the speeds for people."""
    return "times divided by the speeds of the ranks, " + " ".join(f"{s / AS_PROFILED:g}" for s in speeds)
