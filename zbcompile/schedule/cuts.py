"""Pieces and cuts: a model as small pieces between the points where it may be cut, joined into stages.

The pieces are a profile, whose stages they are. ``4 pieces, sizes (1, 3)  -->  stages 0 | 1+2+3``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zbcompile.errors import UsageError
from zbcompile.schedule.coarsen import joined_edges, joined_stage
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import ACCUMULATE, TRANSPORTS, Problem
from zbcompile.schedule.speeds import on_ranks

__all__ = ["CutProblem", "Cuts"]


@dataclass(frozen=True, slots=True)
class Cuts:
    """How pieces were joined into stages.

    Attributes
    ----------
    pieces
        What the pieces cost, and what flows between them.
    sizes
        Pieces of every stage, in order.
    speeds
        Speeds of the ranks in millionths (`zbcompile.schedule.speeds`); empty: all as profiled.

    Raises
    ------
    UsageError
        The sizes are not positive or do not add up to the number of pieces, or a piece has variants.
    """

    pieces: Profile
    sizes: tuple[int, ...]
    speeds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.sizes) or sum(self.sizes) != self.pieces.num_stages:
            raise UsageError(
                "the stages do not add up to the pieces",
                needed=f"positive numbers that sum to {self.pieces.num_stages}",
                given=list(self.sizes),
            )
        if self.pieces.offers_variants:
            raise UsageError("a piece cannot have variants", fix="cut first, and give variants to the stages")

    @property
    def first_pieces(self) -> tuple[int, ...]:
        """The first piece of every stage."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    def profile(self, placement: Placement) -> Profile:
        """Return what the stages cost on the ranks of a placement.

        Times and bytes of pieces add up; a stage's F, B and W carry the host overhead once.
        """
        stages, starts = self.pieces.stages, self.first_pieces
        joined = tuple(
            joined_stage(stages[first : first + size]) for first, size in zip(starts, self.sizes, strict=True)
        )
        part_of = [part for part, size in enumerate(self.sizes) for _ in range(size)]
        whole = replace(self.pieces, stages=joined, edges=joined_edges(self.pieces, part_of))
        return on_ranks(whole, placement, self.speeds)


@dataclass(frozen=True, slots=True)
class CutProblem:
    """A planning problem whose stages are still to be cut out of pieces.

    Attributes
    ----------
    pieces, speeds
        As for `Cuts`.
    frame
        The rest of the problem; its profile is that of any cut and does not matter.

    Raises
    ------
    UsageError
        There are fewer pieces than stages, or not one speed per rank.
    """

    pieces: Profile
    frame: Problem
    speeds: tuple[int, ...] = ()

    @staticmethod
    def of(
        pieces: Profile,
        placement: Placement,
        num_microbatches: int = 1,
        cap: int | Sequence[int | None] | None = None,
        objective: str = "span",
        transport: str = TRANSPORTS[0],
        speeds: Sequence[int] = (),
        *,
        accumulate: str = ACCUMULATE[0],
        kept_gradients: bool = False,
    ) -> CutProblem:
        """Build a problem; the arguments are those of `Problem.of`, and speeds in millionths.

        Raises
        ------
        UsageError
            As for the class, and for `Problem`.
        """
        count, stages = pieces.num_stages, placement.num_stages
        if count < stages:
            raise UsageError(
                f"{count} pieces cannot be cut into {stages} stages",
                needed=f"at most {count} stages",
                given=stages,
            )
        some = Cuts(pieces, (*(1,) * (stages - 1), count - stages + 1), tuple(speeds)).profile(placement)
        frame = Problem.of(
            some,
            placement,
            num_microbatches,
            cap,
            objective,
            transport,
            accumulate=accumulate,
            kept_gradients=kept_gradients,
        )
        return CutProblem(pieces, frame, tuple(speeds))

    @property
    def in_order(self) -> bool:
        """Whether stage k is the only one of rank k."""
        return self.frame.placement == Placement.linear(self.frame.num_ranks)

    def cuts(self, sizes: Sequence[int]) -> Cuts:
        """Return the cuts into stages of so many pieces."""
        return Cuts(self.pieces, tuple(sizes), self.speeds)

    def problem(self, sizes: Sequence[int]) -> Problem:
        """Return the problem of the stages that have so many pieces."""
        return self.frame.with_(profile=self.cuts(sizes).profile(self.frame.placement))
