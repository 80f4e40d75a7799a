"""Dispatch: priorities and a few limits become an order that fits.

Giffler and Thompson (Operations Research 8, 1960): the rank that could complete something first runs an
action that could start before that. Which one, a rule says:

- `BY_KEY`: the one with the smallest key. An F leaves headroom for what may follow at once: one F of every
  deeper stage of its rank that still has F's, then their B's and its own, the deepest first, each with its W.
  In a chain of stages memory therefore never locks up, and nothing that fits one microbatch after the other
  is held back (`zbcompile.schedule.memory` says what they hold).
- `ALTERNATE`, `B_FIRST`, `F_FIRST`: a rank runs its F's **strictly** in the order of their keys and waits for
  the next one; of the B's that have arrived it runs the one with the smallest key. Where an F and a B are
  there, it runs the other kind than last, or always a B, or an F.
- `IN_TURN`: a rank runs its F's and B's strictly in the order of their keys.

By all rules but the first, a W runs where the rank would wait, and where memory lets neither F nor B begin;
with `ALTERNATE` and `B_FIRST` a rank may wait for a B that is on its way though an F could start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from zbcompile.planner.core.compiled import MakeVector, Vector, vector
from zbcompile.planner.core.dispatch_kernel import ALTERNATE, B_FIRST, BY_KEY, F_FIRST, FAR, IN_TURN, place
from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.scorer import Score, Scorer
from zbcompile.planner.core.tables import Tables, unpack

__all__ = [
    "ALTERNATE",
    "BY_KEY",
    "B_FIRST",
    "F_FIRST",
    "IN_TURN",
    "Dispatcher",
    "Recipe",
    "dispatch_pays",
]

_MOST_STEPS = 30_000_000


@dataclass(frozen=True, slots=True)
class Recipe:
    """How actions are chosen, beside their keys. ``None`` is no limit.

    Attributes
    ----------
    rule
        `BY_KEY`, `IN_TURN`, `ALTERNATE`, `B_FIRST` or `F_FIRST`.
    share
        Hundredths of a W that a gap must last before a W fills it.
    in_flight
        Most microbatches between F and B per stage.
    on_rank
        The same per rank, for all of its stages together.
    idle
        Idle time in ns per rank, between its first and last action, before W's fill every gap in which it
        would become the rank that has been idle for longest.
    patience
        Longest wait in ns per rank for a B that is on its way where an F could start. 0 where left out.
    """

    rule: int = BY_KEY
    share: int = 100
    in_flight: tuple[int, ...] | None = None
    on_rank: tuple[int, ...] | None = None
    idle: tuple[int, ...] | None = None
    patience: tuple[int, ...] | None = None

    def flat(self, instance: Instance) -> list[int]:
        """Return S numbers for ``in_flight`` and p each for the others."""
        S, p, m = instance.num_stages, instance.num_ranks, instance.num_microbatches
        limits = [*(self.in_flight or (m,) * S)]
        for row in (self.on_rank, self.idle):
            limits += row or (FAR,) * p
        return limits + list(self.patience or (0,) * p)


def dispatch_pays(instance: Instance) -> bool:
    """Return whether one run takes no more than about a second.

    Every action is chosen among all ranks, and then its rank looks at all of its stages.
    """
    actions = 3 * instance.num_stages * instance.num_microbatches
    return actions * (instance.num_ranks + 8 * max(map(len, instance.stages_of))) <= _MOST_STEPS


class Dispatcher:
    """Dispatch for one problem; keys and recipes change from run to run.

    Parameters
    ----------
    instance
        The problem.
    vector
        Makes the buffers; with ``list`` nothing is compiled.

    Attributes
    ----------
    instance, vector
        The same.
    offsets
        Where each rank's row begins in the line of `run_line`, and its length.
    """

    def __init__(self, instance: Instance, vector: MakeVector = vector) -> None:
        self.instance, self.tables, self.vector = instance, Tables.of(instance, vector), vector
        S, p, m = instance.num_stages, instance.num_ranks, instance.num_microbatches
        sizes = (7 * p, 3 * S, 2 * S * m, 2 * S, S + p)
        self.buffers = tuple(vector([0] * size) for size in sizes)
        rows = (3 * m * len(stages) for stages in instance.stages_of)
        self.offsets = vector(list(accumulate(rows, initial=0)))

    def run(self, keys: Sequence[int], recipe: Recipe) -> Codes | None:
        """Return `run_line` as an order of its own."""
        line = self.run_line(keys, recipe)
        return None if line is None else self.unpacked(line)

    def score(self, keys: Sequence[int], recipe: Recipe, scorer: Scorer) -> Score | None:
        """Return the score of the order by a scorer of the same problem; ``None`` if there is none."""
        line = self.run_line(keys, recipe)
        return None if line is None else scorer.score_line(self.offsets, line)

    def unpacked(self, line: Vector) -> Codes:
        """Return the order in a line that `run_line` returned last."""
        return unpack(self.instance, self.offsets, line)

    def run_line(self, keys: Sequence[int], recipe: Recipe) -> Vector | None:
        """Return the codes in a row.

        Parameters
        ----------
        keys
            Key per (kind, stage, microbatch), in that order, kinds F, B, W; the smaller goes first.
        recipe
            How actions are chosen.

        Returns
        -------
        Vector or None
            ``None`` if the limits leave the dispatch stuck.
        """
        instance, make, m = self.instance, self.vector, self.instance.num_microbatches
        line, limits = make([0] * (3 * instance.num_stages * m)), make(recipe.flat(instance))
        placed = place(
            self.tables,
            make(keys),
            recipe.rule,
            recipe.share,
            limits,
            self.offsets,
            line,
            *self.buffers,
        )
        return line if int(placed) == len(line) else None
