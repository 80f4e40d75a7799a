"""The rule for memory, stated once: what every action takes of its rank's bytes and what it gives back.

    F    takes M_B when it starts
    B    takes M_W and gives back M_B when it ends
    W    gives back M_W when it ends
    BW   gives back M_B when it ends

    W and BW also take one set of gradients when they end if it has to wait for its turn in the sum, and give
    back those sets of their stage that wait no longer (`zbcompile.schedule.held_gradients`)

M_B is `StageCost.saved_bytes`, M_W is `StageCost.saved_for_weight_bytes`, a set of gradients is
`StageCost.gradient_bytes`. A rank's static bytes are held all the time (`Problem.static_bytes`). Sends and
receives hold nothing of their own.

The clock, the judge, the kernels' tables, the dispatch and the makers of orders ask this file. Bounds
(`zbcompile.planner.bounds`), the solver's models (`zbcompile.planner.exact`) and the second derivation
(`zbcompile.planner.certify`) state the rule on their own, because they prove.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.held_gradients import MAKES_GRADIENTS, SumInOrder, set_bytes
from zbcompile.schedule.ir import Kind, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.sum_order import numbered_by_turn

__all__ = ["Memory", "Uses", "in_a_row", "memory_after", "memory_during", "memory_peaks", "uses_of"]


class Use(NamedTuple):
    """What one action does to the bytes of its rank.

    Attributes
    ----------
    taken
        Bytes that it takes when it starts, for itself and for a later action.
    kept
        Bytes that it takes when it ends, for a later action.
    freed
        Bytes that it gives back when it ends.
    """

    taken: int = 0
    kept: int = 0
    freed: int = 0

    @property
    def change(self) -> int:
        """Bytes held after it, less those held before it."""
        return self.taken + self.kept - self.freed

    @property
    def peak(self) -> int:
        """Most bytes held from its start to its end, less those held before it."""
        return max(self.taken, self.change)


class Uses(NamedTuple):
    """What the four compute actions of one stage and microbatch do, in the order F, B, W, BW."""

    forward: Use
    backward_input: Use
    backward_weight: Use
    full_backward: Use

    @staticmethod
    def of_bytes(saved: int, pending: int) -> Uses:
        """State the rule for a stage with M_B = ``saved`` and M_W = ``pending`` bytes."""
        return Uses(
            forward=Use(taken=saved),
            backward_input=Use(kept=pending, freed=saved),
            backward_weight=Use(freed=pending),
            full_backward=Use(freed=saved),
        )

    def backward(self, *, fusing: bool) -> tuple[int, int]:
        """Return (change, peak) of the backward that holds least: BW, or B directly followed by W."""
        return in_a_row(self.full_backward) if fusing else in_a_row(self.backward_input, self.backward_weight)

    def alone(self, *, fusing: bool) -> int:
        """Return the bytes that one microbatch needs: F directly followed by its backward."""
        change, peak = self.backward(fusing=fusing)
        return max(self.forward.peak, self.forward.change + peak)

    @property
    def split_holds_more(self) -> bool:
        """Whether B and W hold more than BW: an order may fit only with its backwards fused."""
        return self.backward(fusing=False)[1] > self.backward(fusing=True)[1]

    @property
    def all_taken(self) -> int:
        """All bytes that F, B and W of one microbatch take: no order holds more of it at once."""
        split = (self.forward, self.backward_input, self.backward_weight)
        return sum(use.taken + use.kept for use in split)

    def most_in_flight(self, headroom: int, most: int) -> int:
        """Return how many microbatches, at most ``most``, may be between F and BW within some bytes."""
        held = self.forward.change
        spare = headroom - max(self.forward.peak - held, self.full_backward.peak)
        if spare < 0:
            return 0
        return min(most, spare // held) if held else most


def in_a_row(*uses: Use) -> tuple[int, int]:
    """Return (change, peak) of actions that run one directly after the other."""
    held = most = 0
    for use in uses:
        most = max(most, held + use.peak)
        held += use.change
    return held, most


def uses_of(cost: StageCost) -> Uses:
    """Return what the actions of a stage take and give back, for one microbatch."""
    return Uses.of_bytes(cost.saved_bytes, cost.saved_for_weight_bytes)


@dataclass(frozen=True, slots=True)
class Memory:
    """The rule for all stages of a problem, as tables.

    Attributes
    ----------
    saved, pending
        M_B and M_W of every stage in bytes, for bounds and solver models.
    uses
        What the actions of every stage take and give back.
    change, peak
        `Use.change` and `Use.peak`: ``change[kind][stage]``, with the kinds F, B, W, BW numbered from 0,
        without gradients that wait.
    set_bytes
        Bytes of one set of gradients that waits for its turn in the sum, per stage; 0 where none waits.
    """

    saved: tuple[int, ...]
    pending: tuple[int, ...]
    uses: tuple[Uses, ...]
    change: tuple[tuple[int, ...], ...]
    peak: tuple[tuple[int, ...], ...]
    set_bytes: tuple[int, ...]

    @staticmethod
    def of(problem: Problem) -> Memory:
        """Collect the tables of a problem, once per profile."""
        sets = tuple(set_bytes(problem, stage) for stage in range(problem.num_stages))
        return _memory_of(problem.profile, sets)

    @staticmethod
    def of_bytes(saved: Sequence[int], pending: Sequence[int]) -> Memory:
        """Collect the tables of stages with other bytes than a problem's, as bounds assume them.

        No gradients wait: a bound that leaves their bytes out holds for orders that have to count them.
        """
        uses = tuple(map(Uses.of_bytes, saved, pending))
        return Memory._of(tuple(saved), tuple(pending), uses, (0,) * len(uses))

    def relaxed(self) -> Memory:
        """Return bytes under which B directly followed by W holds no more than BW, and no order holds more.

        M_W counts as min(M_B, M_W). Bounds over every choice of fusing take these.
        """
        return Memory.of_bytes(self.saved, tuple(map(min, self.saved, self.pending)))

    @property
    def most_at_once(self) -> tuple[int, ...]:
        """Per stage, bytes of a microbatch that no order exceeds: all that its actions take, and its set."""
        return tuple(use.all_taken + size for use, size in zip(self.uses, self.set_bytes, strict=True))

    @staticmethod
    def _of(
        saved: tuple[int, ...], pending: tuple[int, ...], uses: tuple[Uses, ...], sets: tuple[int, ...]
    ) -> Memory:
        kinds = tuple(zip(*uses, strict=True))
        return Memory(
            saved,
            pending,
            uses,
            tuple(tuple(use.change for use in row) for row in kinds),
            tuple(tuple(use.peak for use in row) for row in kinds),
            sets,
        )


@lru_cache(maxsize=4)
def _memory_of(profile: Profile, sets: tuple[int, ...]) -> Memory:
    stages = profile.stages
    saved, pending = (s.saved_bytes for s in stages), (s.saved_for_weight_bytes for s in stages)
    return Memory._of(tuple(saved), tuple(pending), tuple(map(uses_of, stages)), sets)


_COMPUTE = tuple(kind for kind in Kind if kind.is_compute)
_NOTHING = (0, 0)


def _along(schedule: Schedule, problem: Problem, rank: int) -> Iterator[tuple[int, int]]:
    """Yield (change, peak) of each action of a rank."""
    if problem.microbatch_costs:
        yield from _along_unequal(schedule, problem, rank)
        return
    row, stages = schedule.order[rank], problem.profile.stages
    uses = {
        stage: dict(zip(_COMPUTE, uses_of(stages[stage]), strict=True))
        for stage in {action.stage for action in row}
    }
    alone = {stage: {kind: (use.change, use.peak) for kind, use in of.items()} for stage, of in uses.items()}
    sizes = {stage: size for stage in uses if (size := set_bytes(problem, stage))}
    sums = {stage: SumInOrder() for stage in sizes}
    held = dict.fromkeys(sums, 0)
    for action in row:
        stage, kind = action.stage, action.kind
        if stage in sums and kind in MAKES_GRADIENTS:
            sets, before = sums[stage].after(action.microbatch), held[stage]
            held[stage], use = sets, uses[stage][kind]
            use = use._replace(kept=use.kept + (sets - before) * sizes[stage])
            yield use.change, use.peak
        else:
            yield alone[stage].get(kind, _NOTHING)


def _along_unequal(schedule: Schedule, problem: Problem, rank: int) -> Iterator[tuple[int, int]]:
    """Yield the same where microbatches differ."""
    by_turn = numbered_by_turn(schedule, problem).order[rank]
    sums = {action.stage: SumInOrder() for action in by_turn}
    held = dict.fromkeys(sums, 0)
    for action, turn in zip(schedule.order[rank], by_turn, strict=True):
        use, stage = Use(), action.stage
        if action.kind.is_compute:
            cost = problem.profile_of(action.microbatch).stages[stage]
            use = uses_of(cost)[_COMPUTE.index(action.kind)]
        if action.kind in MAKES_GRADIENTS:
            sets, before = sums[stage].after(turn.microbatch), held[stage]
            held[stage] = sets
            use = use._replace(kept=use.kept + (sets - before) * set_bytes(problem, stage))
        yield use.change, use.peak


def memory_after(schedule: Schedule, problem: Problem, rank: int) -> list[int]:
    """Return the bytes held on a rank after each of its actions, static bytes included."""
    changes = (change for change, _ in _along(schedule, problem, rank))
    return list(accumulate(changes, initial=problem.static_bytes(rank)))[1:]


def memory_during(schedule: Schedule, problem: Problem, rank: int) -> Iterator[int]:
    """Yield the most bytes held on a rank while each of its actions runs, static bytes included."""
    held = problem.static_bytes(rank)
    for change, peak in _along(schedule, problem, rank):
        yield held + peak
        held += change


def memory_peaks(schedule: Schedule, problem: Problem) -> list[int]:
    """Return the highest memory per rank in bytes, from the order alone."""
    return [
        max(memory_during(schedule, problem, rank), default=problem.static_bytes(rank))
        for rank in range(schedule.num_ranks)
    ]
