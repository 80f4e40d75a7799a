"""The position of every action of a schedule, as one number. The judge, lowering and the event graph use it.

Actions are numbered rank by rank, first to last. Microbatches are the innermost index, so that callers look
up once what holds for a kind and a stage, and not for every action.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zbcompile.schedule.ir import Action, Kind, Schedule

__all__ = ["Key", "Positions"]

Key = tuple[Kind, int, int | None]
"""An action without its microbatch: kind, stage, peer stage."""

_NONE: Mapping[int, int] = MappingProxyType({})


class Positions:
    """Numbers of a schedule's actions.

    Attributes
    ----------
    base
        The number of each rank's first action, then the count of all actions.
    position
        Per number, the position of the action on its rank.
    rows
        Per `Key`, microbatch -> number. For an action that occurs twice, the number of the first.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.base = [0]
        self.position = [k for row in schedule.order for k in range(len(row))]
        self.rows: dict[Key, dict[int, int]] = {}
        rows = self.rows
        for row in schedule.order:
            for number, action in enumerate(row, self.base[-1]):
                key = (action.kind, action.stage, action.peer)
                numbers = rows.get(key)
                if numbers is None:
                    rows[key] = {action.microbatch: number}
                elif action.microbatch not in numbers:
                    numbers[action.microbatch] = number
            self.base.append(self.base[-1] + len(row))

    def of(self, kind: Kind, stage: int, peer: int | None = None) -> Mapping[int, int]:
        """Return microbatch -> number of one kind, stage and peer; empty when there is no such action."""
        return self.rows.get((kind, stage, peer), _NONE)

    def gradients(self, stage: int) -> Mapping[int, int]:
        """Return microbatch -> number of the action that makes a stage's gradient: the BW, or else the B."""
        fused, split = self.of(Kind.FULL_BACKWARD, stage), self.of(Kind.BACKWARD_INPUT, stage)
        return {**split, **fused} if fused else split

    def made(self, kind: Kind, stage: int) -> Mapping[int, int]:
        """Return microbatch -> number of the action that makes what an F or a B of a stage hands on."""
        return self.gradients(stage) if kind is Kind.BACKWARD_INPUT else self.of(kind, stage)

    def number(self, action: Action) -> int | None:
        """Return the number of an action, or None when it is missing."""
        return self.of(action.kind, action.stage, action.peer).get(action.microbatch)

    @property
    def all_once(self) -> bool:
        """Whether no action occurs twice."""
        return sum(map(len, self.rows.values())) == self.base[-1]
