"""Where every action of a schedule stands, as one number: judging, lowering and timing look it up here.

Actions are numbered rank by rank, first to last. Microbatches are the innermost index, so that whatever
holds for a kind and a stage is found out once and not for every action.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zbcompile.schedule.ir import Action, Kind, Schedule

__all__ = ["Key", "Positions"]

Key = tuple[Kind, int, int | None]
"""All of an action but its microbatch: kind, stage, peer stage."""

_NONE: Mapping[int, int] = MappingProxyType({})


class Positions:
    """Numbers of a schedule's actions.

    base : the number of each rank's first action, then the count of all. position : of every number on its
    rank. rows : per `Key`, microbatch -> number; of an action that stands twice, the number of the first.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.base = [0]
        self.position = [k for row in schedule.order for k in range(len(row))]
        self.rows: dict[Key, dict[int, int]] = {}
        rows, number = self.rows, 0
        for row in schedule.order:
            for action in row:
                key = (action.kind, action.stage, action.peer)
                if key not in rows:
                    rows[key] = {}
                rows[key].setdefault(action.microbatch, number)
                number += 1
            self.base.append(number)

    def of(self, kind: Kind, stage: int, peer: int | None = None) -> Mapping[int, int]:
        """Microbatch -> number; empty when there is no such action."""
        return self.rows.get((kind, stage, peer), _NONE)

    def gradients(self, stage: int) -> Mapping[int, int]:
        """Microbatch -> number of the BW, or else the B, that hands a stage's gradient on."""
        fused, split = self.of(Kind.FULL_BACKWARD, stage), self.of(Kind.BACKWARD_INPUT, stage)
        return {**split, **fused} if fused else split

    def number(self, action: Action) -> int | None:
        """The number of an action; None when it is missing."""
        return self.of(action.kind, action.stage, action.peer).get(action.microbatch)

    @property
    def all_once(self) -> bool:
        """Whether no action stands twice."""
        return sum(map(len, self.rows.values())) == self.base[-1]
