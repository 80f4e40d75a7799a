"""The fractional knapsack: the most time that fits into some bytes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

__all__ = ["fractional"]


def fractional(items: Sequence[tuple[int, int, int]], headroom: int) -> int:
    """Return the most of sum(n_k * time_k) with sum(n_k * bytes_k) <= headroom and 0 <= n_k <= count_k.

    Parameters
    ----------
    items
        (time, bytes, count) of each kind of item.
    headroom
        Bytes to fill.

    Returns
    -------
    int
        The time, rounded down. With one kind of sized item n is kept whole, else fractions are allowed: an
        upper bound of the whole-number optimum either way. Zero if ``headroom`` is negative.
    """
    if headroom < 0:
        return 0
    free = sum(time * count for time, size, count in items if size == 0)
    sized = [item for item in items if item[1] > 0]
    if len({(time, size) for time, size, _ in sized}) == 1:
        time, size, _ = sized[0]
        return free + time * min(headroom // size, sum(count for _, _, count in sized))
    total, left = Fraction(free), headroom
    for time, size, count in sorted(sized, key=lambda item: Fraction(-item[0], item[1])):
        taken = min(left, count * size)
        total += Fraction(time * taken, size)
        left -= taken
    return total.numerator // total.denominator
