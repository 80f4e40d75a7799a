"""Folding: an order with a periodic middle is annealed without its repetitions.

The middle of most good orders repeats one block of q microbatches on every rank. Taken out, block by block,
it leaves an order for fewer microbatches with the same warm-up and cool-down, on which a try of the annealing
takes a fraction of the time. Where the middle has no idle time, one block stays, frozen, so that the others
can be put back: what is gained is gained for any number of microbatches. Where it has, a few copies stay and
are changed alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from zbcompile.planner.core.instance import BW, Codes, Instance
from zbcompile.planner.core.latest_starts import latest_starts
from zbcompile.planner.core.scorer import Scorer

__all__ = ["Folded", "fold"]

_KEPT = 3
"""Microbatches kept, in halves of the number of ranks, where the middle is longer."""


@dataclass(frozen=True, slots=True)
class Folded:
    """An order with ``repeats`` blocks taken out of its middle.

    Attributes
    ----------
    instance
        The problem with fewer microbatches.
    codes
        The order for them.
    frozen_blocks
        Per rank the places of the block (low, high) and how many copies of it stay; ``None``, and no
        ``repeats``, for a whole order.
    repeats
        Blocks taken out.
    """

    instance: Instance
    codes: Codes
    frozen_blocks: list[tuple[int, int, int]] | None = None
    repeats: int = 0

    def unfold(self) -> Codes:
        """Return the whole order again."""
        if self.frozen_blocks is None:
            return self.codes
        return [
            row[:low] + row[low:high] * self.repeats + row[low:]
            for row, (low, high, _) in zip(self.codes, self.frozen_blocks, strict=True)
        ]

    def grown(self, count: int) -> Codes | None:
        """Return the order for ``count`` microbatches.

        ``None`` if no number of whole blocks makes up the difference.
        """
        assert self.frozen_blocks is not None
        low, high, _ = self.frozen_blocks[0]
        block = (high - low) // (3 * len(self.instance.stages_of[0]))
        repeats, left = divmod(count - self.instance.num_microbatches, block)
        return None if left or repeats < 0 else replace(self, repeats=repeats).unfold()


def fold(instance: Instance, codes: Codes, scorer: Scorer) -> Folded | None:
    """Return the order without repetitions of the smallest block that repeats.

    One copy of the block stays if the middle has no idle time; otherwise up to four.

    Parameters
    ----------
    instance
        The problem.
    codes
        The order.
    scorer
        Scorer of ``instance``.

    Returns
    -------
    Folded or None
        ``None`` if the order has no middle that repeats, or fused backwards.
    """
    value = scorer.score(codes)
    if value is None or any(kind == BW for row in codes for kind, _ in row):
        return None
    starts = _row_starts(instance, codes)
    work = max(instance.work(r) // instance.num_microbatches for r in range(instance.num_ranks))
    spare = instance.num_microbatches - _KEPT * instance.num_ranks // 2  # what may be taken out
    for q in range(1, min(instance.num_ranks, spare) + 1):
        middle = _middle(instance, codes, starts, q)
        if middle is None:
            continue
        for copies in (1, 4, 3, 2):
            folded = _fold_at(instance, codes, *middle, q, copies)
            if folded is None or folded.unfold() != codes:
                continue
            short = Scorer(folded.instance).score(folded.codes)
            if short is None or (copies == 1 and short[0] + folded.repeats * q * work != value[0]):
                continue
            return folded
    return None


def _row_starts(instance: Instance, codes: Codes) -> list[list[int]]:
    """Return the start time of every action, row by row."""
    starts = latest_starts(instance, codes)
    rows = []
    for row in codes:
        seen: Counter[tuple[int, int]] = Counter()
        times = []
        for kind, s in row:
            times.append(starts[kind, s, seen[kind, s]])
            seen[kind, s] += 1
        rows.append(times)
    return rows


def _middle(
    instance: Instance, codes: Codes, starts: list[list[int]], q: int
) -> tuple[list[int], int] | None:
    """Return where blocks of q microbatches begin to repeat, and how often they do.

    They begin at one time on all ranks. ``None`` if they repeat on no range of some rank.
    """
    sizes = [3 * q * len(stages) for stages in instance.stages_of]
    runs = []
    for row, size in zip(codes, sizes, strict=True):
        low, high = _longest_run(row, size, q)
        if high == low:
            return None
        runs.append((low, high))
    cut = max(times[low] for times, (low, _) in zip(starts, runs, strict=True))
    lows = [max(low, _first_from(times, cut)) for times, (low, _) in zip(starts, runs, strict=True)]
    return lows, min((high - low) // size for low, (_, high), size in zip(lows, runs, sizes, strict=True))


def _fold_at(
    instance: Instance, codes: Codes, lows: list[int], blocks: int, q: int, copies: int
) -> Folded | None:
    """Take out what can be spared of the ``blocks`` from ``lows`` on; ``copies`` stay."""
    p, m = instance.num_ranks, instance.num_microbatches
    sizes = [3 * q * len(stages) for stages in instance.stages_of]
    most = blocks - copies
    repeats = min(most, (m - _KEPT * p // 2) // q - copies + 1)
    if repeats < 1:
        return None
    skipped = (most - repeats) // 2
    lows = [low + skipped * size for low, size in zip(lows, sizes, strict=True)]
    rows = [
        row[:low] + row[low + repeats * size :] for row, low, size in zip(codes, lows, sizes, strict=True)
    ]
    frozen_blocks = [(low, low + size, copies) for low, size in zip(lows, sizes, strict=True)]
    return Folded(replace(instance, num_microbatches=m - repeats * q), rows, frozen_blocks, repeats)


def _longest_run(row: list[tuple[int, int]], size: int, q: int) -> tuple[int, int]:
    """Return the longest range that repeats itself after ``size`` places, q of each action in a block."""
    best, low = (0, 0), 0
    for k in range(len(row) - size + 1):
        if k == len(row) - size or row[k] != row[k + size]:
            if k > low and k + size - low > best[1] - best[0]:
                best = (low, k + size)
            low = k + 1
    counts = Counter(row[best[0] : best[0] + size])
    return best if counts and all(count == q for count in counts.values()) else (0, 0)


def _first_from(times: list[int], cut: int) -> int:
    """Return the first place that starts at the cut or later."""
    return next((k for k, time in enumerate(times) if time >= cut), len(times))
