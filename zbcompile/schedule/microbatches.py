"""Microbatches that differ in cost: factors on a profile's times and bytes.

Costs stay whole numbers: a factor is a number of millionths, and a cost times its factor is rounded to the
nearest nanosecond or byte (halves up). A fused BW is rounded down, so that rounding alone never makes it
longer than its B and W. A larger cost or factor never gives less: bounds count on that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from zbcompile.errors import UsageError
from zbcompile.schedule.costs import Edge, Profile, StageCost

__all__ = ["MILLION", "MOST_FACTOR_PPM", "MicrobatchCost", "profile_of"]

MILLION = 1_000_000

_NUMBER = re.compile(r"\d{1,4}(\.\d{0,30})?|\.\d{1,30}|\d(\.\d{1,30})?e-\d{1,3}")

MOST_FACTOR_PPM = 1_000 * MILLION
"""Largest factor: a microbatch a thousand times as long as the profile's."""


@dataclass(frozen=True, slots=True)
class MicrobatchCost:
    """What one microbatch costs, as factors of what the profile says.

    Attributes
    ----------
    time_ppm
        Factor of all times of compute actions, in millionths: one for all stages, or one per stage. Host
        overhead and latency are as the profile says.
    bytes_ppm
        Factor of M_B, M_W and the sizes of messages that a stage sends forward or gets gradients for, in the
        same way.

    Raises
    ------
    UsageError
        A factor is not a whole number from 0 to `MOST_FACTOR_PPM`.
    """

    time_ppm: tuple[int, ...] = (MILLION,)
    bytes_ppm: tuple[int, ...] = (MILLION,)

    def __post_init__(self) -> None:
        for name in ("time_ppm", "bytes_ppm"):
            factors = getattr(self, name)
            for factor in factors or (-1,):
                whole = isinstance(factor, int) and not isinstance(factor, bool)
                if not whole or not 0 <= factor <= MOST_FACTOR_PPM:
                    raise UsageError(
                        f"MicrobatchCost.{name} is a factor in millionths, or one per stage",
                        needed=f"whole numbers from 0 to {MOST_FACTOR_PPM}",
                        given=factor if factors else "none",
                        fix="MicrobatchCost.of(1.3) makes one of a factor 1.3",
                    )

    @staticmethod
    def of(time: float | str, size: float | str = 1) -> MicrobatchCost:
        """Return factors for all stages, rounded to millionths.

        Parameters
        ----------
        time
            Factor of all times, as a number or its decimal digits: 1.3 or ``"1.3"``.
        size
            Factor of all bytes.

        Raises
        ------
        UsageError
            One of them is no number from 0 to 1000.
        """
        return MicrobatchCost((_ppm(time),), (_ppm(size),))

    @property
    def same_for_all_stages(self) -> bool:
        """Whether one factor of times and one of bytes hold for all stages."""
        return len(self.time_ppm) == len(self.bytes_ppm) == 1

    def time_of(self, stage: int) -> int:
        """Return the factor of a stage's times, in millionths."""
        return self.time_ppm[stage if len(self.time_ppm) > 1 else 0]

    def fits(self, num_stages: int) -> bool:
        """Return whether the factors are one for all, or one for each of so many stages."""
        return {len(self.time_ppm), len(self.bytes_ppm)} <= {1, num_stages}


def _ppm(factor: float | str) -> int:
    text = factor.strip() if isinstance(factor, str) else repr(float(factor))
    exact = Fraction(text) * MILLION if _NUMBER.fullmatch(text) else Fraction(-1)
    if not 0 <= exact <= MOST_FACTOR_PPM:
        raise UsageError(
            "the factor of a microbatch's cost is no number from 0 to 1000", given=str(factor)[:40]
        )
    return int(exact + Fraction(1, 2))


def _times(amount: int, factor_ppm: int) -> int:
    """Return an amount times a factor, rounded to the nearest whole number, halves up."""
    return (amount * factor_ppm + MILLION // 2) // MILLION


def _stage(cost: StageCost, time_ppm: int, bytes_ppm: int) -> StageCost:
    return replace(
        cost,
        forward_ns=_times(cost.forward_ns, time_ppm),
        backward_input_ns=_times(cost.backward_input_ns, time_ppm),
        backward_weight_ns=_times(cost.backward_weight_ns, time_ppm),
        full_backward_ns=cost.full_backward_ns * time_ppm // MILLION,
        saved_bytes=_times(cost.saved_bytes, bytes_ppm),
        saved_for_weight_bytes=_times(cost.saved_for_weight_bytes, bytes_ppm),
        variants=tuple(_stage(way, time_ppm, bytes_ppm) for way in cost.variants),
    )


def _edge(edge: Edge, bytes_ppm: int) -> Edge:
    return replace(
        edge,
        forward_bytes=_times(edge.forward_bytes, bytes_ppm),
        backward_bytes=_times(edge.backward_bytes, bytes_ppm),
    )


@lru_cache(maxsize=1024)
def profile_of(profile: Profile, cost: MicrobatchCost) -> Profile:
    """Return the profile that one microbatch has: every cost of the given one times its factor."""
    count = profile.num_stages
    times, sizes = (_each(row, count) for row in (cost.time_ppm, cost.bytes_ppm))
    return replace(
        profile,
        stages=tuple(map(_stage, profile.stages, times, sizes)),
        edges=tuple(_edge(edge, sizes[edge.source]) for edge in profile.edges),
    )


def _each(factors: Sequence[int], num_stages: int) -> Sequence[int]:
    return tuple(factors) * num_stages if len(factors) == 1 else factors
