"""Rounds: list schedules for looped placements, from the real times.

Microbatches go in groups, as in interleaved 1F1B (arXiv 2104.04473, section 2.2): a rank runs the F's of a
group stage by stage, and its B's in the reverse order of its stages. A rank keeps **strictly** to the order of
its F's, and waits for the next one. Of the B's that have arrived it runs the first. A W runs where the rank
would wait, and where memory lets neither an F nor a B begin; otherwise W's wait without limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.tables import Tables, unpack, vector
from zbcompile.planner.starts.rounds_kernel import ALTERNATE, B_FIRST, F_FIRST, place_rounds

__all__ = ["SETTINGS", "Setting", "applies", "most_in_group", "rounds_order", "rounds_orders"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters of one order.

    Attributes
    ----------
    more
        Microbatches of a group beyond the number of ranks.
    slope
        F's in flight that a rank has beyond those of the next rank.
    extra
        Further F's in flight, in numbers of ranks; ``None`` for no limit but memory.
    rule
        `ALTERNATE`, `B_FIRST` or `F_FIRST`: what runs where an F and a B are both ready.
    fill
        Hundredths of a W that a gap must last before the W fills it.
    pending
        Most W's that wait on rank r, in multiples of r; ``None`` for no limit.
    """

    more: int
    slope: int | None
    extra: int
    rule: int
    fill: int
    pending: int | None


SETTINGS = (
    Setting(0, 2, 0, ALTERNATE, 0, None),
    Setting(1, 2, 0, ALTERNATE, 0, None),
    Setting(0, 2, 0, B_FIRST, 0, None),
    Setting(0, 1, 1, F_FIRST, 50, None),
    Setting(3, 2, 0, ALTERNATE, 0, None),
    Setting(0, None, 0, F_FIRST, 50, 2),
)


def applies(instance: Instance) -> bool:
    """Return whether the placement is looped, with two or more stages on some rank: stage s on s mod p."""
    p = instance.num_ranks
    return instance.num_stages > p and all(r == s % p for s, r in enumerate(instance.rank_of))


def most_in_group(instance: Instance) -> int:
    """Return the most microbatches of a group that memory allows, 0 if it does not allow one.

    Before its first B a rank holds the F's of a whole group for all of its stages but the last, and one of
    that.
    """
    most = instance.num_microbatches
    for r, stages in enumerate(instance.stages_of):
        saved = [instance.saved[s] for s in stages]
        headroom = instance.headroom[r] - saved[-1] - _reserve(instance, r)
        before = sum(saved[:-1])
        if headroom < 0:
            return 0
        if before:
            most = min(most, headroom // before)
    return most


def _reserve(instance: Instance, rank: int) -> int:
    """Return the bytes that an F leaves free on a rank, so that the next B fits."""
    return max(0, *(instance.pending[s] - instance.saved[s] for s in instance.stages_of[rank]))


def rounds_order(instance: Instance, group: int, setting: Setting) -> Codes | None:
    """Return one order, or ``None`` if memory locks it up.

    Parameters
    ----------
    instance
        The problem.
    group
        Microbatches of a group.
    setting
        The other parameters.
    """
    S, p, m = instance.num_stages, instance.num_ranks, instance.num_microbatches
    no_limit = S * m + 1
    most, pending = [], []
    for r, stages in enumerate(instance.stages_of):
        own = (len(stages) - 1) * group + 1
        slope = setting.slope
        most.append(no_limit if slope is None else own + slope * (p - 1 - r) + setting.extra * p)
        pending.append(no_limit if setting.pending is None else setting.pending * r)
    sizes = [3 * m * len(stages) for stages in instance.stages_of]
    offsets = vector([sum(sizes[:r]) for r in range(p + 1)])
    line = vector([0] * (3 * S * m))
    placed = place_rounds(
        Tables.of(instance),
        group,
        vector(most),
        setting.rule,
        setting.fill,
        vector(pending),
        vector([_reserve(instance, r) for r in range(p)]),
        offsets,
        line,
        vector([0] * (8 * p)),
        vector([0] * (3 * S)),
        vector([0] * (2 * S * m)),
        vector([0] * (S * m)),
    )
    return unpack(instance, offsets, line) if int(placed) == 3 * S * m else None


def rounds_orders(instance: Instance, stop: Callable[[], bool] = lambda: False) -> list[Codes]:
    """Return the orders of all settings that memory allows, the one that is mostly best first.

    Parameters
    ----------
    instance
        The problem.
    stop
        Asked before every order whether to end early.

    Returns
    -------
    list of Codes
        Empty for other placements than looped ones.
    """
    if not applies(instance):
        return []
    found: list[Codes] = []
    room = most_in_group(instance)
    for setting in SETTINGS:
        group = min(instance.num_ranks, room) + setting.more
        if group > room or group < 1:
            continue
        if stop():
            break
        codes = rounds_order(instance, group, setting)
        if codes is not None and codes not in found:
            found.append(codes)
    return found
