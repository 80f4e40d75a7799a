"""The fractional knapsack: the most time that fits into some bytes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

__all__ = ["by_density", "filled", "fractional"]

Item = tuple[int, int, int]
"""(time, bytes, count) of a kind of item."""


def fractional(items: Sequence[Item], headroom: int) -> int:
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
    whole = len({(time, size) for time, size, _ in items if size}) == 1
    return filled([items[k] for k in by_density(items)], headroom, whole=whole)


def by_density(items: Sequence[Item]) -> list[int]:
    """Return the places of the items, most time per byte first."""

    def key(k: int) -> tuple[bool, Fraction]:
        time, size, _ = items[k]
        return size > 0, Fraction(-time, size or 1)

    return sorted(range(len(items)), key=key)


def filled(items: Sequence[Item], headroom: int, *, whole: bool) -> int:
    """Return the time of items taken in the order given until the bytes are used up, rounded down.

    Parameters
    ----------
    items
        (time, bytes, count), most time per byte first.
    headroom
        Bytes to fill, not negative.
    whole
        Whether of the last item taken no fraction counts.
    """
    total = 0
    for time, size, count in items:
        taken = min(count, headroom // size) if size else count
        if taken < count and not whole:
            return total + time * headroom // size
        total += time * taken
        headroom -= taken * size
    return total
