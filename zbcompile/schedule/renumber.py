"""The same problem with other numbers of the ranks.

Ranks are alike but for their stages, caps and links, so an order is worth the same under every numbering.
Some searches and bounds look for a chain of stages on ranks 0, 1, 2, ...: numbered by first stages, all
problems that differ in their ranks' numbers alone are planned alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from zbcompile.schedule.costs import Profile
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Certificate, Solution

__all__ = ["Numbering"]

_RANKS = frozenset({"rank", "outer_rank", "inner_rank"})
"""What witnesses call ranks."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Numbering:
    """New numbers of the ranks.

    Attributes
    ----------
    new
        The new number of every rank.
    """

    new: tuple[int, ...]

    @staticmethod
    def by_first_stage(placement: Placement) -> Numbering:
        """Number the ranks of a placement in the order of their first stages."""
        first = sorted(range(placement.num_ranks), key=lambda rank: placement.stages_of(rank)[0])
        return Numbering(tuple(first.index(rank) for rank in range(placement.num_ranks)))

    @property
    def is_same(self) -> bool:
        """Whether every rank keeps its number."""
        return self.new == tuple(range(len(self.new)))

    @property
    def words(self) -> str:
        """Say how the ranks of a text are numbered."""
        return f"ranks are numbered by their first stages; 0, 1, ... are {self.back().new}"

    def back(self) -> Numbering:
        """Return the numbering that gives every rank its old number."""
        return Numbering(tuple(self.new.index(rank) for rank in range(len(self.new))))

    def of_ranks(self, values: Sequence[T]) -> tuple[T, ...]:
        """Return one value per rank in the order of the new numbers."""
        return tuple(values[old] for old in self.back().new)

    def of_placement(self, placement: Placement) -> Placement:
        """Return the placement with the new numbers."""
        return Placement(tuple(self.new[rank] for rank in placement.rank_of))

    def of_profile(self, profile: Profile) -> Profile:
        """Return the profile with its links between the new numbers."""
        links = tuple(
            ((self._known(source), self._known(target)), link) for (source, target), link in profile.links
        )
        return replace(profile, links=links)

    def _known(self, rank: int) -> int:
        """Return the new number of a rank; a link may name one that the placement does not have."""
        return self.new[rank] if rank < len(self.new) else rank

    def of_problem(self, problem: Problem) -> Problem:
        """Return the problem with the new numbers."""
        return problem.with_(
            profile=self.of_profile(problem.profile),
            placement=self.of_placement(problem.placement),
            caps=self.of_ranks(problem.caps),
        )

    def of_witness(self, witness: Mapping[str, object]) -> dict[str, object]:
        """Return the witness of a bound with the new numbers, where it names ranks that there are."""
        return {name: self._renamed(name, value) for name, value in witness.items()}

    def _renamed(self, name: str, value: object) -> object:
        if name in _RANKS and type(value) is int and 0 <= value < len(self.new):
            return self.new[value]
        if isinstance(value, Mapping):
            return self.of_witness(value)
        if isinstance(value, (list, tuple)):
            return [self.of_witness(entry) if isinstance(entry, Mapping) else entry for entry in value]
        return value

    def of_certificate(self, certificate: Certificate) -> Certificate:
        """Return the certificate with the new numbers."""
        return replace(certificate, witness=self.of_witness(certificate.witness))

    def of_solution(self, solution: Solution) -> Solution:
        """Return the solution with the new numbers."""
        schedule, offered = solution.schedule, solution.offered
        rows = self.of_ranks(schedule.order)
        return replace(
            solution,
            problem=self.of_problem(solution.problem),
            schedule=Schedule.of(self.of_placement(schedule.placement), schedule.num_microbatches, rows),
            certificate=self.of_certificate(solution.certificate),
            offered=None if offered is None else self.of_profile(offered),
        )
