"""Profiles, format ``zbcompile.profile`` version 1; a file may state other parts of a problem too.

They are written as JSON, and read as JSON or TOML: the fields are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbcompile.formats.fields import at, guarded, parse_json
from zbcompile.formats.problem_json import (
    ACCUMULATION,
    CAPS,
    COUNT,
    KEPT_GRADIENTS,
    MICROBATCH_COSTS,
    OBJECTIVE,
    PROFILE,
    TRANSPORT,
    PlacementOrName,
    check_amount,
    check_problem,
    named_placement,
)
from zbcompile.formats.records import Document, Field, Part, Record
from zbcompile.formats.toml import is_toml, parse_toml
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import ACCUMULATE, OBJECTIVES, TRANSPORTS, Problem

__all__ = ["FILE", "ProfileFile", "dumps", "loads"]


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A profile and the other parts of a problem that the file states; None for those that it does not.

    Attributes
    ----------
    caps
        Bytes: one entry for all ranks or one per rank, None for no limit; empty when not stated.
    microbatch_costs
        One entry per microbatch where they differ; empty when not stated.
    """

    profile: Profile
    placement: Placement | None = None
    num_microbatches: int | None = None
    caps: tuple[int | None, ...] = ()
    objective: str | None = None
    transport: str | None = None
    accumulate: str | None = None
    kept_gradients: bool | None = None
    microbatch_costs: tuple[MicrobatchCost, ...] = ()

    def problem(
        self,
        *,
        placement: Placement | None = None,
        num_microbatches: int | None = None,
        caps: Sequence[int | None] = (),
        objective: str | None = None,
        transport: str | None = None,
        accumulate: str | None = None,
        kept_gradients: bool | None = None,
        microbatch_costs: Sequence[MicrobatchCost] = (),
    ) -> Problem:
        """Return the problem that the file and the arguments state; arguments win.

        What neither states is linear placement, two microbatches per rank (or as many as have a cost), no
        cap, span and ``async``.

        Raises
        ------
        UsageError
            The parts do not fit together.
        """
        where = placement or self.placement or Placement.linear(self.profile.num_stages)
        costs = tuple(microbatch_costs) or self.microbatch_costs
        count = num_microbatches or self.num_microbatches or len(costs) or 2 * where.num_ranks
        limits = tuple(caps) or self.caps
        if len(limits) == 1:
            limits *= where.num_ranks
        return Problem.of(
            self.profile,
            where,
            count,
            limits,
            objective or self.objective or OBJECTIVES[0],
            transport or self.transport or TRANSPORTS[0],
            accumulate=accumulate or self.accumulate or ACCUMULATE[0],
            kept_gradients=bool(self.kept_gradients if kept_gradients is None else kept_gradients),
            microbatch_costs=costs,
        )


FILE = Document(
    "zbcompile.profile",
    version=1,
    title="zbcompile profile",
    record=Record(
        ProfileFile,
        (
            Field(
                "microbatches",
                COUNT,
                "microbatches of a step",
                default=None,
                key="num_microbatches",
                null=True,
                brief=True,
            ),
            Field(
                "placement",
                PlacementOrName(),
                "the rank of every stage, which are 0, 1, ... without a hole, or a name",
                default=None,
                null=True,
                brief=True,
            ),
            CAPS,
            OBJECTIVE,
            TRANSPORT,
            replace(ACCUMULATION, default=None),
            replace(KEPT_GRADIENTS, default=None),
            MICROBATCH_COSTS,
            Part("profile", PROFILE),
        ),
        "What stages and links cost, in nanoseconds and bytes, and perhaps the rest of a planning problem.",
    ),
)


def loads(text: str, where: str = "profile") -> ProfileFile:
    """Read a profile file, JSON or TOML.

    Parameters
    ----------
    where
        The name of the file, for messages; one that ends in ``.toml`` or ``.json`` says what the text is.

    Raises
    ------
    FormatError
        The text is broken, foreign or out of bounds; the message names the field.
    """
    values = FILE.values_of((parse_toml if is_toml(text, where) else parse_json)(text, where), where)
    name, stages = values["placement"], values["profile"].num_stages
    if isinstance(name, str):
        values["placement"] = guarded(lambda: named_placement(name, stages), at(where, "placement"))
    result = ProfileFile(**values)
    check_amount(result.profile, result.num_microbatches or 1, where)
    check_problem(guarded(result.problem, where), where)
    return result


def dumps(content: ProfileFile | Profile) -> str:
    """Return the text of a profile file. The same content gives the same bytes."""
    return FILE.dumps(ProfileFile(content) if isinstance(content, Profile) else content)
