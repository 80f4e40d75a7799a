"""Formats times, bytes and shares for people, and chooses the ticks of a time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BytesUnit", "TimeUnit", "bytes_unit", "format_bytes", "found_by", "percent", "ticks", "time_unit"]

_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """The unit of a whole picture.

    Attributes
    ----------
    size_ns
        Its length in ns.
    name
        How it is written.
    """

    size_ns: int
    name: str

    def text(self, time_ns: int) -> str:
        """Write a time with four significant digits and the unit."""
        return f"{self.number(time_ns)} {self.name}"

    def number(self, time_ns: int) -> str:
        """Write a time with four significant digits and no unit."""
        value = time_ns / self.size_ns
        if time_ns % self.size_ns == 0 and value < 1e6:
            return str(time_ns // self.size_ns)
        return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def time_unit(longest_ns: int, *, abstract: bool = False) -> TimeUnit:
    """Choose the unit in which a time reads well.

    Parameters
    ----------
    longest_ns
        The longest time to write.
    abstract
        The costs are not times: the unit is called ``units``.
    """
    if abstract:
        return TimeUnit(1, "units")
    for size, name in _TIMES:
        if longest_ns >= 2 * size:
            return TimeUnit(size, name)
    return TimeUnit(1, "ns")


@dataclass(frozen=True, slots=True)
class BytesUnit:
    """A binary unit of bytes.

    Attributes
    ----------
    size
        Its bytes.
    name
        How it is written.
    """

    size: int
    name: str

    def number(self, count: int) -> str:
        """Write bytes with three significant digits and no unit."""
        value = count / self.size
        return f"{value:.0f}" if value >= 100 or self.size == 1 else f"{value:.3g}"


def bytes_unit(most: int) -> BytesUnit:
    """Choose the unit in which an amount reads well."""
    size, name = next(((size, name) for size, name in _BYTES if abs(most) >= size), (1, "B"))
    return BytesUnit(size, name)


def format_bytes(count: int) -> str:
    """Write bytes with three significant digits and a binary unit: ``3.21 GiB``."""
    unit = bytes_unit(count)
    return f"{unit.number(count)} {unit.name}"


def percent(share: float, digits: int = 1) -> str:
    """Write a share as per cent: ``8.1 %``."""
    return f"{100 * share:.{digits}f} %"


def found_by(lineage: Sequence[str]) -> str:
    """Write how an order came to be: ``found by list_schedule > fold > anneal``."""
    return f"found by {' > '.join(lineage)}"


def ticks(first_ns: int, last_ns: int, most: int) -> list[int]:
    """Return at most ``most`` round times from first to last, spaced by 1, 2 or 5 times a power of ten."""
    length = last_ns - first_ns
    if length <= 0 or most < 1:
        return [first_ns]
    step = 1
    while length // step + 1 > most:
        step = step // 2 * 5 if str(step)[0] == "2" else step * 2
    return list(range(-(-first_ns // step) * step, last_ns + 1, step))
