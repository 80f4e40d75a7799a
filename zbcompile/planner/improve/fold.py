"""Folding: an order with a periodic middle is annealed without its repetitions.

The middle of most good orders repeats one block of q microbatches on every rank. Taken out, block by block,
it leaves an order for fewer microbatches with the same warm-up and cool-down, on which a try of the annealing
takes a fraction of the time. Where the middle has no idle time, one block stays, frozen, so that the others
can be put back: what is gained is gained for any number of microbatches. Where it has, a few copies stay and
are changed alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace

from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, W
from zbcompile.planner.core.score import latest_row_starts
from zbcompile.planner.core.scorer import Scorer

__all__ = ["Folded", "fold"]

Row = list[tuple[int, int]]
"""A rank's actions in order, as (kind, stage)."""

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
        block = self.codes[0][low:high].count((F, self.instance.stages_of[0][0]))
        repeats, left = divmod(count - self.instance.num_microbatches, block)
        return None if left or repeats < 0 else replace(self, repeats=repeats).unfold()


def fold(instance: Instance, codes: Codes, scorer: Scorer) -> Folded | None:
    """Return the order without repetitions of the smallest block that repeats; ``None`` if none does.

    One copy of the block stays if the middle has no idle time; otherwise up to four.
    """
    value = scorer.score(codes)
    if value is None:
        return None
    starts = latest_row_starts(instance, codes)
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
            if short is None:
                continue
            if copies == 1 and short[0] + folded.repeats * _longest_block(folded) != value[0]:
                continue
            return folded
    return None


def _longest_block(folded: Folded) -> int:
    """Return the work in ns of the frozen block of the busiest rank."""
    instance = folded.instance
    times = (instance.forward, instance.backward, instance.weight, instance.fused)
    return max(
        sum(times[kind][s] for kind, s in row[low:high])
        for row, (low, high, _) in zip(folded.codes, folded.frozen_blocks or (), strict=True)
    )


def _middle(
    instance: Instance, codes: Codes, starts: list[list[int]], q: int
) -> tuple[list[int], list[int], int] | None:
    """Return where blocks of q microbatches begin to repeat, their sizes, and how often they do.

    They begin at one time on all ranks. ``None`` if they repeat on no range of some rank.
    """
    sizes, runs = [], []
    for row, stages in zip(codes, instance.stages_of, strict=True):
        size = _block_size(row, len(stages), q)
        low, high = _longest_run(row, size)
        if high == low or not _is_block(row[low : low + size], stages, q):
            return None
        sizes.append(size)
        runs.append((low, high))
    cut = max(times[low] for times, (low, _) in zip(starts, runs, strict=True))
    lows = [max(low, bisect_left(times, cut)) for times, (low, _) in zip(starts, runs, strict=True)]
    blocks = min((high - low) // size for low, (_, high), size in zip(lows, runs, sizes, strict=True))
    return lows, sizes, blocks


def _block_size(row: Row, stages: int, q: int) -> int:
    """Return the number of actions of q microbatches in the middle of a rank's row.

    Where some are BW, the row says it: in the middle between the first backward and the last F, an action
    comes again after q of its kind. 0 if none does.
    """
    kinds = [kind for kind, _ in row]
    if BW not in kinds:
        return 3 * q * stages
    first = next(k for k, kind in enumerate(kinds) if kind in (B, BW))
    last = len(kinds) - 1 - kinds[::-1].index(F)
    begin = (first + last) // 2
    again = [k for k in range(begin + 1, len(row)) if row[k] == row[begin]]
    return again[q - 1] - begin if len(again) >= q else 0


def _is_block(block: Row, stages: tuple[int, ...], q: int) -> bool:
    """Return whether these are all actions of q microbatches."""
    counts = Counter(block)
    backwards = [(counts[F, s], counts[B, s] + counts[BW, s], counts[W, s] + counts[BW, s]) for s in stages]
    return all(counted == (q, q, q) for counted in backwards)


def _fold_at(
    instance: Instance, codes: Codes, lows: list[int], sizes: list[int], blocks: int, q: int, copies: int
) -> Folded | None:
    """Take out what can be spared of the ``blocks`` from ``lows`` on; ``copies`` stay."""
    p, m = instance.num_ranks, instance.num_microbatches
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


def _longest_run(row: Row, size: int) -> tuple[int, int]:
    """Return the longest range that repeats itself after ``size`` places."""
    best, low = (0, 0), 0
    for k in range(len(row) - size + 1 if size else 0):
        if k == len(row) - size or row[k] != row[k + size]:
            if k > low and k + size - low > best[1] - best[0]:
                best = (low, k + size)
            low = k + 1
    return best
