"""Amounts with a unit, such as ``18.5ms``, ``2 GiB`` or ``25GB/s``, as whole ns, bytes and bytes per second.

Nothing is guessed: a number without a unit, ``2G``, ``2KB`` and ``2Gb`` are refused, because people mean
different amounts by them. A time must be a whole number of ns. A fraction of a byte is rounded up, so that
memory is never understated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zbcompile.errors import UsageError
from zbcompile.schedule.limits import MAX_AMOUNT

__all__ = ["RATE", "SIZE", "TIME", "Unit", "has_unit"]

_NUMBER = "(?:[0-9]{1,18}(?:[.][0-9]{1,18})?|[.][0-9]{1,18})"
_BARE = re.compile("[0-9.]*")


@dataclass(frozen=True, slots=True)
class Unit:
    """What amounts of one kind may be written in.

    Attributes
    ----------
    noun
        What they are, for messages.
    sizes
        Whole ns, bytes or bytes per second of each unit.
    example
        An amount, for messages.
    rounds_up
        Whether a fraction counts as one more; else it is refused.
    """

    noun: str
    sizes: Mapping[str, int]
    example: str
    rounds_up: bool = False

    @property
    def pattern(self) -> str:
        """The regular expression of all that is read, for schemas too."""
        return f"^{_NUMBER} ?({'|'.join(self.sizes)})$"

    def read(self, text: str) -> int:
        """Return an amount, such as 18,500,000 for ``18.5ms``.

        Raises
        ------
        UsageError
            The text is no amount, has no unit or one that is not known, or is no whole number or too large.
        """
        match = re.fullmatch(f"({_NUMBER}) ?([^ ]*)", text)
        if match is None:
            raise UsageError(f"{text[:40]!r} is no {self.noun}", fix=f"write it as {self.example}")
        number, unit = match.groups()
        if unit not in self.sizes:
            what = f"{unit[:20]!r} is no unit of a {self.noun}" if unit else f"{number} has no unit"
            raise UsageError(what, needed=self.names, fix=f"write it as {self.example}")
        whole, _, fraction = number.partition(".")
        scaled, part = divmod(int(whole + fraction) * self.sizes[unit], 10 ** len(fraction))
        if part and not self.rounds_up:
            raise UsageError(f"{text[:40]} is no whole number of ns", fix="round it")
        amount: int = scaled + (part > 0)
        if amount > MAX_AMOUNT:
            raise UsageError(f"{text[:40]} is too much", needed=f"at most {MAX_AMOUNT}", given=amount)
        return amount

    @property
    def names(self) -> str:
        """The names of the units, for messages."""
        *first, last = self.sizes
        return f"{', '.join(first)} or {last}"


TIME = Unit("time", MappingProxyType({"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}), "18.5ms")

_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

SIZE = Unit("size", MappingProxyType(_SIZES), "2GiB", rounds_up=True)

RATE = Unit(
    "rate", MappingProxyType({f"{name}/s": size for name, size in _SIZES.items()}), "25GB/s", rounds_up=True
)


def has_unit(text: str) -> bool:
    """Return whether a text is more than a bare number."""
    return not _BARE.fullmatch(text.strip())
