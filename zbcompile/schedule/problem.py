"""The planning problem: everything that decides what an order is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, TypeVar, Unpack

from zbcompile.errors import UsageError
from zbcompile.schedule.costs import Edge, Profile
from zbcompile.schedule.ir import MAX_COUNT, Placement
from zbcompile.schedule.microbatches import MicrobatchCost, profile_of
from zbcompile.schedule.semantics import SEND_MODES, SendMode, send_mode

__all__ = ["ACCUMULATE", "OBJECTIVES", "TRANSPORTS", "Accumulate", "Objective", "Problem"]

Objective = Literal["span", "makespan"]
"""What to make short: max over ranks of (last end - first start), or first start to last end of all ranks."""

OBJECTIVES: tuple[Objective, ...] = ("span", "makespan")
Accumulate = Literal["order", "memory"]
"""How gradients of weights are summed: in the order of the microbatches, with the bits of a plain loop, or as
they come, so that none waits."""

ACCUMULATE: tuple[Accumulate, ...] = ("order", "memory")
TRANSPORTS = tuple(mode.name for mode in SEND_MODES)
"""Names of the send modes; the first is the default."""

Choice = TypeVar("Choice", bound=str)


class _Changes(TypedDict, total=False):
    """The fields of a `Problem`."""

    profile: Profile
    placement: Placement
    num_microbatches: int
    caps: tuple[int | None, ...]
    objective: Objective
    transport: str
    accumulate: Accumulate
    kept_gradients: bool
    microbatch_costs: tuple[MicrobatchCost, ...]


def _chosen(name: str, given: str, choices: Sequence[Choice]) -> Choice:
    for choice in choices:
        if given == choice:
            return choice
    raise UsageError(f"unknown {name} {given!r}", needed=" or ".join(choices))


@dataclass(frozen=True, slots=True)
class Problem:
    """Profile, placement, microbatches, memory caps, objective and send mode.

    Attributes
    ----------
    profile
        Costs of the stages and links.
    placement
        The rank of every stage.
    num_microbatches
        Microbatches of a step.
    caps
        Bytes per rank, None for no limit. The static bytes of the rank's stages count.
    objective
        ``span`` (max over ranks of last end - first start) or ``makespan`` (first start to last end over all
        ranks).
    transport
        Name of the send mode (`zbcompile.schedule.semantics`): what a send does to its rank.
    accumulate
        How gradients of weights are summed: in the ``order`` of the microbatches, or as they come, which
        takes the least ``memory``.
    kept_gradients
        Whether gradients of earlier steps are still held when a step begins: a set of each stage beside the
        one that its static bytes count.
    microbatch_costs
        Per microbatch, what it costs as factors of the profile; empty where all cost what the profile says.

    Raises
    ------
    UsageError
        The parts do not fit together, or one of them is out of range or unknown.

    Notes
    -----
    Source of the span: arXiv 2401.10241, section 2.2.
    """

    profile: Profile
    placement: Placement
    num_microbatches: int
    caps: tuple[int | None, ...] = ()
    objective: Objective = "span"
    transport: str = TRANSPORTS[0]
    accumulate: Accumulate = "order"
    kept_gradients: bool = False
    microbatch_costs: tuple[MicrobatchCost, ...] = ()

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
        _chosen("objective", self.objective, OBJECTIVES)
        _chosen("accumulate", self.accumulate, ACCUMULATE)
        send_mode(self.transport)
        if self.microbatch_costs:
            self._check_microbatches()

    def _check_microbatches(self) -> None:
        costs, count = self.microbatch_costs, self.num_microbatches
        if len(costs) != count:
            raise UsageError(
                "one cost per microbatch", where="microbatch_costs", needed=count, given=len(costs)
            )
        for i, cost in enumerate(costs):
            if not cost.fits(self.num_stages):
                raise UsageError(
                    "the factors of a microbatch are one for all stages or one per stage",
                    where=f"microbatch_costs, microbatch {i}",
                    needed=f"1 or {self.num_stages} factors",
                    given=[len(cost.time_ppm), len(cost.bytes_ppm)],
                )
        if set(costs) == {MicrobatchCost()}:
            object.__setattr__(self, "microbatch_costs", ())

    @staticmethod
    def of(
        profile: Profile,
        placement: Placement | None = None,
        num_microbatches: int = 1,
        cap: int | Sequence[int | None] | None = None,
        objective: str = "span",
        transport: str = TRANSPORTS[0],
        accumulate: str = ACCUMULATE[0],
        kept_gradients: bool = False,
        microbatch_costs: Sequence[MicrobatchCost] = (),
    ) -> Problem:
        """Build a problem with the usual defaults.

        Parameters
        ----------
        placement
            Linear if left out.
        cap
            Bytes: one cap for all ranks, one per rank, or None for no limit.
        objective, transport, accumulate
            Any text; a name that is unknown is refused.
        microbatch_costs
            As for the class.

        Raises
        ------
        UsageError
            As for the class.
        """
        placement = placement or Placement.linear(profile.num_stages)
        ranks = placement.num_ranks
        caps = (cap,) * ranks if cap is None or isinstance(cap, int) else tuple(cap)
        return Problem(
            profile,
            placement,
            num_microbatches,
            caps,
            _chosen("objective", objective, OBJECTIVES),
            transport,
            accumulate=_chosen("accumulate", accumulate, ACCUMULATE),
            kept_gradients=kept_gradients,
            microbatch_costs=tuple(microbatch_costs),
        )

    def with_(self, **changes: Unpack[_Changes]) -> Problem:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    @property
    def sends(self) -> SendMode:
        """The send mode itself: what a send does to its rank."""
        return send_mode(self.transport)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the placement."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages of the placement."""
        return self.placement.num_stages

    def profile_of(self, microbatch: int) -> Profile:
        """Return the profile that one microbatch has: what it costs on every stage and edge."""
        costs = self.microbatch_costs
        return profile_of(self.profile, costs[microbatch]) if costs else self.profile

    def one(self, microbatch: int) -> Problem:
        """Return the problem all of whose microbatches cost what one of them does."""
        if not self.microbatch_costs:
            return self
        return self.with_(profile=self.profile_of(microbatch), microbatch_costs=())

    def profiles(self) -> list[Profile]:
        """Return the profiles of all microbatches, those that are alike once."""
        return [profile_of(self.profile, cost) for cost in dict.fromkeys(self.microbatch_costs)] or [
            self.profile
        ]

    def alike(self, how: Callable[[list[int]], int]) -> Problem:
        """Return the problem with microbatches that are alike.

        Parameters
        ----------
        how
            What every cost is, from those of all microbatches: ``min``, ``max`` or a mean.
        """
        profiles = [self.profile_of(i) for i in range(self.num_microbatches)]
        return self.with_(profile=Profile.combined(profiles, how), microbatch_costs=())

    def edge_of(self, edge: Edge, microbatch: int) -> Edge:
        """Return one of the profile's edges with the sizes of one microbatch's messages."""
        if not self.microbatch_costs:
            return edge
        return self.profile_of(microbatch).edges[self.profile.edges.index(edge)]

    def static_bytes(self, rank: int) -> int:
        """Return the bytes that the rank's stages hold all the time, gradients that are kept included."""
        own = [self.profile.stages[s] for s in self.placement.stages_of(rank)]
        kept = sum(stage.gradient_bytes for stage in own) if self.kept_gradients else 0
        return kept + sum(stage.static_bytes for stage in own)

    def headroom(self, rank: int) -> int | None:
        """Return cap minus static bytes: bytes left for activations (may be negative). None: no limit."""
        cap = self.caps[rank]
        return None if cap is None else cap - self.static_bytes(rank)

    def work_ns(self, rank: int) -> int:
        """Return the time of all F, B and W on a rank in one step in ns, without host overhead."""
        stages = self.placement.stages_of(rank)
        if not self.microbatch_costs:
            return self.num_microbatches * sum(self.profile.stages[s].work_ns for s in stages)
        each = (self.profile_of(i).stages for i in range(self.num_microbatches))
        return sum(costs[s].work_ns for costs in each for s in stages)

    def lag_ns(self, edge: Edge, *, backward: bool = False) -> int:
        """Return the travel time in ns of one message along an edge; ``backward``: of its gradient.

        With microbatches that differ, the edge is one of `profile_of`.
        """
        source, target = self.placement.rank_of[edge.source], self.placement.rank_of[edge.target]
        if source == target:
            return 0
        if backward:
            return self.profile.link_between(target, source).transfer_ns(edge.backward_bytes)
        return self.profile.link_between(source, target).transfer_ns(edge.forward_bytes)
