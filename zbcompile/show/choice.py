"""Which ranks a picture draws, and with how many lanes each, so that it fits its screen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbcompile.schedule.simulate import Timeline

__all__ = ["Lanes", "chosen_ranks", "fitting_lanes"]

_LANES = 16
"""Most ranks with lanes of memory and messages where nothing says how many fit."""
_AIRY = 8
"""Most ranks with an empty line between them."""
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Lanes:
    """What is drawn of every rank.

    Attributes
    ----------
    messages, memory
        Whether these lanes are drawn.
    airy
        Whether an empty line follows.
    bars
        Lanes of work: two where a measured one is under the planned one.
    """

    messages: bool
    memory: bool
    airy: bool
    bars: int = 1

    @property
    def each(self) -> int:
        """Lines of one rank."""
        return self.bars + self.messages + self.memory + self.airy


def fitting_lanes(
    ranks: int, lines: int | None, messages: bool | None, memory: bool | None, bars: int = 1
) -> Lanes:
    """Choose the lanes of every rank: the most that fit.

    Parameters
    ----------
    lines
        Lines that there are for all ranks; None for any number.
    messages, memory
        Whether the lane is wanted; None where the room decides.
    bars
        Lanes of work of a rank.
    """
    choices = []
    for with_messages, with_memory, airy in ((1, 1, 1), (1, 1, 0), (0, 1, 0), (0, 0, 0)):
        lanes = Lanes(
            bool(with_messages) if messages is None else messages,
            bool(with_memory) if memory is None else memory,
            False,
            bars,
        )
        choices.append(replace(lanes, airy=bool(airy) and lanes.each > 1 and ranks <= _AIRY))
    if lines is None:
        return choices[0 if ranks <= _LANES else -1]
    return next((lanes for lanes in choices if ranks * lanes.each - lanes.airy <= lines), choices[-1])


def chosen_ranks(timeline: Timeline, most: int) -> list[int]:
    """Return at most ``most`` ranks (three at least): the first, the last, the most idle, others between."""
    ranks, most = timeline.schedule.num_ranks, max(_FEWEST, most)
    if ranks <= most:
        return list(range(ranks))
    worst = sorted(range(1, ranks - 1), key=lambda rank: (timeline.busy_ns(rank), rank))
    chosen = sorted([0, ranks - 1, *worst[: max(1, (most - 2) // 4)]])
    while len(chosen) < most:
        gap = max(range(len(chosen) - 1), key=lambda k: chosen[k + 1] - chosen[k])
        chosen.insert(gap + 1, (chosen[gap] + chosen[gap + 1]) // 2)
    return chosen
