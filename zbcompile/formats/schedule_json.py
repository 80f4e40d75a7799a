"""Schedules as JSON, format ``zbcompile.schedule`` version 1: an order, its problem and its certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zbcompile.errors import FormatError, UsageError
from zbcompile.formats.fields import at, guarded, integer, items
from zbcompile.formats.problem_json import (
    ACCUMULATION,
    CAPS,
    COUNT,
    KEPT_GRADIENTS,
    MAX_STAGES,
    MICROBATCH_COSTS,
    OBJECTIVE,
    PLACEMENT,
    PROFILE,
    RANK,
    TRANSPORT,
    check_amount,
    check_problem,
)
from zbcompile.formats.records import Document, Field, Record
from zbcompile.formats.shapes import (
    AMOUNT,
    TEXT,
    JsonObject,
    ListOf,
    Schema,
    Shape,
    Whole,
    Word,
    row_schema,
)
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.cuts import Cuts
from zbcompile.schedule.ir import MAX_COUNT, Action, Kind, Placement, Schedule
from zbcompile.schedule.problem import OBJECTIVES, TRANSPORTS, Problem
from zbcompile.schedule.solution import Certificate, Solution

__all__ = ["ACTION", "CERTIFICATE", "FILE", "ScheduleFile", "action_to", "check_size", "dumps", "loads"]

_KINDS = {kind.value: kind for kind in Kind}
_NAMES = {kind: kind.value for kind in Kind}
_SMALL = 1 << 16
_MAX_LINEAGE = 64


@dataclass(frozen=True, slots=True)
class ScheduleFile:
    """The contents of a schedule file. Only the order is always there.

    Attributes
    ----------
    schedule
        The order.
    problem
        The problem, one variant per stage fixed in its profile; None for an order without costs.
    certificate
        What is proved about the order; None for nothing.
    variants
        Which variant, per stage (0: the stage itself).
    origin
        How the order was found, for people.
    offered
        The profile with all its variants, from which ``variants`` chooses; None where no stage offers any.
    cuts
        The pieces that the stages were cut out of; None where the cuts were not chosen with the order.
    """

    schedule: Schedule
    problem: Problem | None = None
    certificate: Certificate | None = None
    variants: tuple[int, ...] = ()
    origin: str = ""
    offered: Profile | None = None
    cuts: Cuts | None = None

    @staticmethod
    def of(solution: Solution) -> ScheduleFile:
        """Return the contents of the file of a planner's result."""
        return ScheduleFile(
            solution.schedule,
            solution.problem,
            solution.certificate,
            solution.variants,
            solution.origin,
            solution.offered,
            solution.cuts,
        )

    def solution(self) -> Solution:
        """Return the planner's result again.

        Raises
        ------
        FormatError
            The file has no profile or no certificate.
        """
        if self.problem is None or self.certificate is None:
            raise FormatError(
                "the schedule carries no " + ("profile" if self.problem is None else "certificate"),
                fix="plan it with `zbcompile plan PROFILE.json`",
            )
        return Solution(
            self.problem, self.schedule, self.certificate, self.variants, self.origin, self.offered, self.cuts
        )


class _Action(Shape[Action]):
    """``[kind, stage, microbatch]``, and for a send or receive the stage at the other end.

    The microbatch of an action of a stage as a whole is 0.
    """

    name = "action"

    def read(self, value: object, where: str) -> Action:
        return _action(value, where, MAX_STAGES, MAX_COUNT)

    def write(self, value: Action) -> list[object]:
        return action_to(value)

    def schema(self, definitions: Schema) -> Schema:
        stage, microbatch = Whole(high=MAX_STAGES - 1), Whole(high=MAX_COUNT - 1)
        compute, message = (
            Word("kind", [kind.value for kind in Kind if kind.is_message == wanted])
            for wanted in (False, True)
        )
        return {
            "description": "[kind, stage, microbatch], and for a send or receive the stage at the other end",
            "oneOf": [
                row_schema(definitions, compute, stage, microbatch),
                row_schema(definitions, message, stage, microbatch, stage),
            ],
        }


ACTION = _Action()


class _Order(Shape[Any]):
    """A row of actions per rank. They are read by `_order`, which knows the stages and microbatches."""

    def read(self, value: object, where: str) -> list[object]:
        return items(value, where, high=MAX_STAGES)

    def write(self, value: Sequence[Sequence[Action]]) -> list[object]:
        return [[action_to(action) for action in row] for row in value]

    def schema(self, definitions: Schema) -> Schema:
        row = ListOf(ACTION, len(Kind) * MAX_COUNT)
        return ListOf(row, MAX_STAGES, least=1).schema(definitions)


CERTIFICATE = Record(
    Certificate,
    (
        Field("objective", Word("objective", OBJECTIVES)),
        Field("value_ns", AMOUNT, "span or makespan of the order"),
        Field("bound_ns", AMOUNT, "no order of this problem is shorter"),
        Field("method", TEXT, "what proved the bound", default=""),
        Field("witness", JsonObject(), "the bound's evidence", default=lambda _: {}, null=True),
        Field(
            "lineage",
            ListOf(TEXT, _MAX_LINEAGE),
            "how the order came to be, first to last: the start and what improved on it",
            default=(),
            brief=True,
        ),
    ),
    name="certificate",
)


_CUTS = Record(
    Cuts,
    (
        Field("pieces", PROFILE, "what the pieces cost; its stages are the pieces"),
        Field("sizes", ListOf(Whole(1, MAX_STAGES), MAX_STAGES, least=1), "pieces of every stage, in order"),
        Field(
            "speeds",
            ListOf(Whole(1, MAX_COUNT * 1000), MAX_STAGES),
            "per rank in millionths of the speed that the pieces' times are for; left out: all as profiled",
            default=(),
            brief=True,
        ),
    ),
    "how the stages were cut out of pieces",
    name="cuts",
)


def _parts(content: ScheduleFile) -> Mapping[str, Any]:
    """Return the fields of a file that its contents fill."""
    schedule, problem = content.schedule, content.problem
    parts = {
        "placement": schedule.placement,
        "num_microbatches": schedule.num_microbatches,
        "origin": content.origin,
        "certificate": content.certificate,
        "order": schedule.order,
    }
    if problem is None:
        return parts
    return {
        **parts,
        "objective": problem.objective,
        "transport": problem.transport,
        "accumulate": problem.accumulate,
        "kept_gradients": problem.kept_gradients,
        "caps": problem.caps,
        "microbatch_costs": problem.microbatch_costs,
        "variants": content.variants,
        "profile": _written_profile(content, problem),
        "cuts": content.cuts,
    }


FILE = Document(
    "zbcompile.schedule",
    version=1,
    title="zbcompile schedule",
    record=Record(
        dict,
        (
            Field("placement", PLACEMENT, "the rank of every stage; ranks are 0, 1, ... without a hole"),
            Field("microbatches", COUNT, "microbatches of a step", key="num_microbatches"),
            Field("origin", TEXT, "how the order was found", default=""),
            Field("certificate", CERTIFICATE, default=None, null=True, brief=True),
            OBJECTIVE,
            TRANSPORT,
            ACCUMULATION,
            KEPT_GRADIENTS,
            CAPS,
            MICROBATCH_COSTS,
            Field(
                "variants",
                ListOf(RANK, MAX_STAGES),
                "the variant chosen per stage, 0 for the stage itself",
                default=(),
                null=True,
            ),
            Field(
                "profile",
                PROFILE,
                "with all variants that were offered",
                default=None,
                null=True,
            ),
            Field("cuts", _CUTS, "where the cuts were chosen with the order", default=None, brief=True),
            Field("order", _Order(), "what each rank does, first to last"),
        ),
        "An order of actions per rank. Times are not stored: they follow from the profile.",
        parts=_parts,
    ),
)


def dumps(content: ScheduleFile | Solution | Schedule) -> str:
    """Return the text of a schedule file. The same content gives the same bytes."""
    if isinstance(content, Solution):
        content = ScheduleFile.of(content)
    elif isinstance(content, Schedule):
        content = ScheduleFile(content)
    return FILE.dumps(content)


def loads(text: str, where: str = "schedule") -> ScheduleFile:
    """Read a schedule file.

    The order that is returned is well formed, but may be illegal: `zbcompile.schedule.check` judges it.

    Raises
    ------
    FormatError
        The text is broken, foreign or out of bounds; the message names the field.
    """
    values = FILE.values(text, where)
    placement, count = values["placement"], values["num_microbatches"]
    schedule = Schedule.of(placement, count, _order(values["order"], at(where, "order"), placement, count))
    check_size(schedule, where)
    problem, certificate = _problem(values, where), values["certificate"]
    if certificate is not None and (problem is None or certificate.objective != problem.objective):
        raise FormatError("the certificate belongs to another problem", where=at(where, "certificate"))
    variants, place = values["variants"], at(where, "variants")
    if variants and len(variants) != placement.num_stages:
        raise FormatError(
            "one variant per stage", where=place, needed=placement.num_stages, given=len(variants)
        )
    offered = None
    if problem is not None and problem.profile.offers_variants:
        offered = problem.profile
        chosen = variants or (0,) * placement.num_stages
        problem = problem.with_(profile=guarded(lambda: offered.choose(chosen), place))
    cuts = values["cuts"]
    if cuts is not None:
        _check_cuts(cuts, problem, at(where, "cuts"))
    return ScheduleFile(schedule, problem, certificate, variants, values["origin"], offered, cuts)


def _check_cuts(cuts: Cuts, problem: Problem | None, where: str) -> None:
    """Refuse cuts that do not make the stages of the problem's profile."""
    stages = 0 if problem is None else problem.num_stages
    if problem is None or len(cuts.sizes) != stages:
        raise FormatError(
            "one size per stage of a profile", where=where, needed=stages, given=len(cuts.sizes)
        )
    check_amount(cuts.pieces, problem.num_microbatches, at(where, "pieces"))
    if guarded(lambda: cuts.profile(problem.placement), where) != problem.profile:
        raise FormatError("the profile is not what the cuts make of the pieces", where=where)


def _written_profile(content: ScheduleFile, problem: Problem) -> Profile:
    """Return the profile as it was offered; with ``variants`` it gives the problem's own again."""
    offered = content.offered
    if offered is None:
        return problem.profile
    if offered.choose(content.variants) != problem.profile:
        raise UsageError("the problem is not what its variants choose from the profile", where="variants")
    return offered


def action_to(action: Action) -> list[object]:
    """Return ``["forward", stage, microbatch]``; a send or receive has the peer stage as a fourth entry."""
    head: list[object] = [_NAMES[action.kind], action.stage, action.microbatch]
    return head if action.peer is None else [*head, action.peer]


def check_size(schedule: Schedule, where: str) -> None:
    """Refuse counts that promise far more actions than there are, before anything is allocated by them.

    Raises
    ------
    FormatError
        The order is shorter than its stages and microbatches need.
    """
    cells = schedule.num_stages * schedule.num_microbatches
    given = sum(len(row) for row in schedule.order)
    if cells > _SMALL and given < 2 * cells:
        raise FormatError(
            "the order is shorter than its stages and microbatches need",
            where=where,
            needed=f"at least {2 * cells} actions",
            given=given,
        )


def _order(
    rows: Sequence[object], where: str, placement: Placement, num_microbatches: int
) -> list[list[Action]]:
    if len(rows) != placement.num_ranks:
        raise FormatError(
            "one row of actions per rank", where=where, needed=placement.num_ranks, given=len(rows)
        )
    stages, order = placement.num_stages, []
    for rank, row in enumerate(rows):
        place = f"{where}[{rank}]"
        entries = items(row, place, high=len(Kind) * MAX_COUNT)
        order.append(
            [
                _well_formed(v, stages, num_microbatches)
                or _action(v, f"{place}[{k}]", stages, num_microbatches)
                for k, v in enumerate(entries)
            ]
        )
    return order


def _well_formed(value: object, num_stages: int, num_microbatches: int) -> Action | None:
    """Read a well formed action quickly; return None for others: `_action` names what is wrong."""
    if type(value) is not list or not 3 <= len(value) <= 4 or type(value[0]) is not str:
        return None
    kind, stage, microbatch, peer = _KINDS.get(value[0]), value[1], value[2], value[-1]
    if kind is None or (len(value) == 4) != kind.is_message:
        return None
    if not type(stage) is type(microbatch) is type(peer) is int:
        return None
    if not (0 <= stage < num_stages and 0 <= microbatch < num_microbatches):
        return None
    if not kind.is_message:
        return None if kind.is_of_stage and microbatch else Action(kind, stage, microbatch)
    return Action(kind, stage, microbatch, peer) if 0 <= peer < num_stages else None


def _action(value: object, where: str, num_stages: int, num_microbatches: int) -> Action:
    """Read what `action_to` wrote."""
    if not isinstance(value, list) or not 3 <= len(value) <= 4:
        raise FormatError('expected an action such as ["forward", 0, 0]', where=where)
    name, stage, microbatch = value[:3]
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise FormatError(
            f"unknown kind {str(name)[:40]!r}", where=where, needed="one of " + ", ".join(_KINDS)
        )
    integer(stage, f"{where} (stage)", high=num_stages - 1)
    integer(microbatch, f"{where} (microbatch)", high=num_microbatches - 1)
    if len(value) == 3:
        return guarded(lambda: Action(kind, stage, microbatch), where)
    peer = integer(value[3], f"{where} (peer stage)", high=num_stages - 1)
    return guarded(lambda: Action(kind, stage, microbatch, peer), where)


def _problem(values: Mapping[str, Any], where: str) -> Problem | None:
    profile, caps, placement = values["profile"], values["caps"], values["placement"]
    count = values["num_microbatches"]
    costs = values["microbatch_costs"]
    if profile is None:
        if costs:
            place = at(where, "microbatch_costs")
            raise FormatError("costs of microbatches without a profile say nothing", where=place)
        if caps:
            raise FormatError("caps without a profile say nothing", where=at(where, "caps_bytes"))
        return None
    check_amount(profile, count, at(where, "profile"))
    limits = caps * placement.num_ranks if len(caps) == 1 else caps
    objective, transport = values["objective"] or OBJECTIVES[0], values["transport"] or TRANSPORTS[0]
    sums = {name: values[name] for name in ("accumulate", "kept_gradients")}
    problem = guarded(
        lambda: Problem(
            profile, placement, count, limits, objective, transport, **sums, microbatch_costs=costs
        ),
        where,
    )
    check_problem(problem, where)
    return problem
