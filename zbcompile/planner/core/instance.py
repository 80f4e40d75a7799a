"""A problem as plain integer tuples: what bounds, list schedules and searches work on."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbcompile.errors import UsageError
from zbcompile.planner.core.step_costs import StepCosts
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.memory import Memory
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.rules import COMPUTE_KINDS, Rules, durations

__all__ = [
    "BW",
    "B",
    "Codes",
    "F",
    "Fusing",
    "Instance",
    "Op",
    "W",
    "is_chain",
    "is_numbered",
    "is_path",
    "numbered",
    "shaped",
    "to_codes",
    "to_schedule",
]

F, B, W, BW = 0, 1, 2, 3
KINDS = COMPUTE_KINDS

Codes = list[list[tuple[int, int]]]
"""An order as (kind, stage) pairs per rank; the microbatch is how often the pair came before."""

Op = tuple[int, int, int]
"""An action as (kind, stage, microbatch)."""


class Fusing(enum.Enum):
    """Which backwards run fused: those where it helps, none, or all."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"

    @staticmethod
    def of(choice: str | Fusing) -> Fusing:
        """Return the member of a public name. Raises `UsageError` if there is none."""
        try:
            return Fusing(choice)
        except ValueError:
            raise UsageError(f"unknown choice of fusing {choice!r}", needed="auto, never or always") from None


@dataclass(frozen=True, slots=True)
class Instance:
    """A problem's times, bytes and dependencies, without names, links or files.

    Attributes
    ----------
    num_microbatches
        Microbatches of a step.
    rank_of
        Rank of every stage.
    stages_of
        Stages of every rank, in increasing order.
    forward, backward, weight, fused
        Time of F, B, W and BW of every stage in ns, host overhead included.
    memory
        What actions take and give back.
    headroom
        Bytes per rank for activations: the cap minus the static bytes, never ``None``.
    rules
        What actions wait for.
    objective
        ``span`` or ``makespan``.
    steps
        What stages cost once a step.
    """

    num_microbatches: int
    rank_of: tuple[int, ...]
    stages_of: tuple[tuple[int, ...], ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...]
    fused: tuple[int, ...]
    memory: Memory
    headroom: tuple[int, ...]
    rules: Rules
    objective: str
    steps: StepCosts

    @staticmethod
    def of(problem: Problem) -> Instance:
        """Flatten a problem. A rank without a cap gets the bytes that all of its work could hold at once."""
        return Instance.under(problem, Rules.of(problem))

    @staticmethod
    def under(problem: Problem, rules: Rules) -> Instance:
        """Flatten a problem with the rules that were read from its dependency graph.

        `Instance.of` reads the same rules from the walk that makes the graph. Microbatches are alike here:
        those that differ have `zbcompile.planner.core.unequal`. Raises `UsageError` for them.
        """
        if problem.microbatch_costs:
            raise UsageError(
                "this is not there for microbatches that differ in cost", where="microbatch_costs"
            )
        times, memory = durations(problem), Memory.of(problem)
        stages_of = tuple(problem.placement.stages_of(r) for r in range(problem.num_ranks))
        headroom, at_once = [], memory.most_at_once
        for rank, held in enumerate(stages_of):
            most = problem.num_microbatches * sum(at_once[s] for s in held)
            given = problem.headroom(rank)
            headroom.append(most if given is None else min(given, most))
        return Instance(
            problem.num_microbatches,
            problem.placement.rank_of,
            stages_of,
            times[Kind.FORWARD],
            times[Kind.BACKWARD_INPUT],
            times[Kind.BACKWARD_WEIGHT],
            times[Kind.FULL_BACKWARD],
            memory,
            tuple(headroom),
            rules,
            problem.objective,
            StepCosts.of(problem),
        )

    def relaxed(self) -> Instance:
        """Return costs without fusing that undercut every choice of fusing: bounds for them hold for all.

        A BW of time D is a B of time min(TB, D) directly followed by a W of the rest: its gradient leaves no
        later, and its memory is held no longer (`Memory.relaxed`).
        """
        backward = tuple(min(b, d) for b, d in zip(self.backward, self.fused, strict=True))
        weight = tuple(min(w, d - b) for w, d, b in zip(self.weight, self.fused, backward, strict=True))
        return replace(self, backward=backward, weight=weight, memory=self.memory.relaxed())

    def without_steps(self) -> Instance:
        """Return the problem whose step is its F's, B's and W's alone."""
        nothing = (0,) * self.num_stages
        return replace(self, steps=StepCosts(nothing, nothing, (0,) * self.num_ranks))

    @property
    def saved(self) -> tuple[int, ...]:
        """M_B of every stage in bytes, for proofs; searches ask ``memory``."""
        return self.memory.saved

    @property
    def pending(self) -> tuple[int, ...]:
        """M_W of every stage in bytes, for proofs; searches ask ``memory``."""
        return self.memory.pending

    @property
    def forward_from(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per stage, as (stage, travel time in ns), what its F waits for of other stages."""
        return self.rules.forward_from

    @property
    def backward_from(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per stage, as (stage, travel time in ns), what its B or BW waits for of other stages."""
        return self.rules.backward_from

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.headroom)

    def work(self, rank: int) -> int:
        """Time of all F, B, W of a rank in one step."""
        return self.num_microbatches * sum(
            self.forward[s] + self.backward[s] + self.weight[s] for s in self.stages_of[rank]
        )


def is_chain(instance: Instance) -> bool:
    """Return whether each rank has one stage, in rank order, that feeds the next and gets a gradient back."""
    return instance.rank_of == tuple(range(instance.num_stages)) and is_path(instance)


def is_path(instance: Instance) -> bool:
    """Return whether each stage, on whatever rank, feeds the next alone and gets a gradient back."""
    last = instance.num_stages - 1
    return all(
        [other for other, _ in instance.forward_from[s]] == ([s - 1] if s else [])
        and [other for other, _ in instance.backward_from[s]] == ([s + 1] if s < last else [])
        for s in range(last + 1)
    )


def numbered(codes: Sequence[Sequence[tuple[int, int]]]) -> list[list[Op]]:
    """Give the actions of an order their microbatches.

    The k-th F of a stage is that of microbatch k, and so is its k-th B or BW. A W belongs to the earliest
    split microbatch that still has none.
    """
    order = []
    for row in codes:
        count: dict[tuple[int, int], int] = {}
        waiting: dict[int, deque[int]] = {}
        ops = []
        for kind, stage in row:
            if kind == W:
                microbatch = waiting[stage].popleft()
            else:
                key = (F if kind == F else B, stage)
                microbatch = count.get(key, 0)
                count[key] = microbatch + 1
                if kind == B:
                    waiting.setdefault(stage, deque()).append(microbatch)
            ops.append((kind, stage, microbatch))
        order.append(ops)
    return order


def to_schedule(codes: Sequence[Sequence[tuple[int, int]]], problem: Problem) -> Schedule:
    """Return an order with its microbatches as `numbered` gives them."""
    order = [[Action(KINDS[kind], stage, i) for kind, stage, i in row] for row in numbered(codes)]
    return Schedule.of(problem.placement, problem.num_microbatches, order)


def is_numbered(schedule: Schedule) -> bool:
    """Return whether a compute order numbers its microbatches as `numbered` does."""
    for row in schedule.order:
        count: dict[tuple[bool, int], int] = {}
        waiting: dict[int, deque[int]] = {}
        for action in row:
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            if kind is Kind.BACKWARD_WEIGHT:
                first = waiting.get(stage)
                if not first or first.popleft() != microbatch:
                    return False
                continue
            key = (kind is Kind.FORWARD, stage)
            if microbatch != count.get(key, 0):
                return False
            count[key] = microbatch + 1
            if kind is Kind.BACKWARD_INPUT:
                waiting.setdefault(stage, deque()).append(microbatch)
    return True


def to_codes(schedule: Schedule) -> Codes:
    """Forget the microbatch numbers of a schedule. Microbatches are alike, so nothing is lost."""
    index = {kind: k for k, kind in enumerate(KINDS)}
    return [[(index[a.kind], a.stage) for a in row if a.kind.is_compute] for row in schedule.order]


def shaped(codes: Codes, fusing: Fusing) -> Codes:
    """Return the order with every backward split (never fusing) or fused (always fusing), or as it is."""
    if fusing is Fusing.NEVER:
        return [
            [op for kind, s in row for op in (((B, s), (W, s)) if kind == BW else ((kind, s),))]
            for row in codes
        ]
    if fusing is Fusing.ALWAYS:
        return [[(BW if kind == B else kind, s) for kind, s in row if kind != W] for row in codes]
    return codes
