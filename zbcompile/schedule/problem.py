"""A Problem: everything that decides what an order is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbcompile.errors import UsageError
from zbcompile.schedule.costs import Edge, Profile
from zbcompile.schedule.ir import MAX_COUNT, Placement

__all__ = ["OBJECTIVES", "TRANSPORTS", "Problem"]

OBJECTIVES = ("span", "makespan")
TRANSPORTS = ("async", "rendezvous", "batched")


@dataclass(frozen=True, slots=True)
class Problem:
    """Profile + placement + microbatches + caps + objective + transport.

    caps : bytes per rank, ``None`` for no limit; static bytes of the rank's stages count.
    objective : ``span`` (max over ranks of last end - first start) or ``makespan``.
    transport : how sends behave. ``async``: a send never holds up its rank. ``rendezvous``: the
        rank waits at its next send until the one before it is received. ``batched``: a send is
        exchanged together with the next receive, in the same blocking call.
    """

    profile: Profile
    placement: Placement
    num_microbatches: int
    caps: tuple[int | None, ...] = ()
    objective: str = "span"
    transport: str = "async"

    def __post_init__(self) -> None:
        stages, ranks = self.placement.num_stages, self.placement.num_ranks
        if self.profile.num_stages != stages:
            raise UsageError(
                "the placement and the profile differ in the number of stages",
                needed=f"{self.profile.num_stages} stages in the placement",
                given=stages,
            )
        if not 1 <= self.num_microbatches <= MAX_COUNT:
            raise UsageError("a step needs at least one microbatch", given=self.num_microbatches)
        if not self.caps:
            object.__setattr__(self, "caps", (None,) * ranks)
        if len(self.caps) != ranks:
            raise UsageError("one cap per rank", needed=ranks, given=len(self.caps))
        for rank, cap in enumerate(self.caps):
            if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < 0):
                raise UsageError("a cap is a whole number of bytes", where=f"rank {rank}", given=cap)
        if self.objective not in OBJECTIVES:
            raise UsageError(f"unknown objective {self.objective!r}", needed=" or ".join(OBJECTIVES))
        if self.transport not in TRANSPORTS:
            raise UsageError(f"unknown transport {self.transport!r}", needed=" or ".join(TRANSPORTS))

    @staticmethod
    def of(
        profile: Profile,
        placement: Placement | None = None,
        num_microbatches: int = 1,
        cap: int | Sequence[int | None] | None = None,
        objective: str = "span",
        transport: str = "async",
    ) -> Problem:
        """Build with the usual defaults: linear placement, one cap for all ranks or none."""
        placement = placement or Placement.linear(profile.num_stages)
        ranks = placement.num_ranks
        caps = (cap,) * ranks if cap is None or isinstance(cap, int) else tuple(cap)
        return Problem(profile, placement, num_microbatches, caps, objective, transport)

    def with_(self, **changes: object) -> Problem:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the placement."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages of the placement."""
        return self.placement.num_stages

    def static_bytes(self, rank: int) -> int:
        """Bytes that the rank's stages hold all the time."""
        return sum(self.profile.stages[s].static_bytes for s in self.placement.stages_of(rank))

    def headroom(self, rank: int) -> int | None:
        """Cap minus static bytes: what is left for activations (may be negative); None: no limit."""
        cap = self.caps[rank]
        return None if cap is None else cap - self.static_bytes(rank)

    def work_ns(self, rank: int) -> int:
        """Time of all F, B and W on a rank in one step, host overhead left out."""
        return self.num_microbatches * sum(
            self.profile.stages[s].work_ns for s in self.placement.stages_of(rank)
        )

    def lag_ns(self, edge: Edge, *, backward: bool = False) -> int:
        """Travel time of one message along an edge, from stage to stage."""
        source, target = self.placement.rank_of[edge.source], self.placement.rank_of[edge.target]
        if source == target:
            return 0
        if backward:
            return self.profile.link_between(target, source).transfer_ns(edge.backward_bytes)
        return self.profile.link_between(source, target).transfer_ns(edge.forward_bytes)
