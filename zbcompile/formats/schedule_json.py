"""Schedules as JSON, format ``zbcompile.schedule`` version 1: an order, its problem and its certificate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zbcompile.errors import FormatError, UsageError
from zbcompile.formats.fields import Fields, format_json, guarded, integer, items, parse_json, plain, readable
from zbcompile.formats.profile_json import (
    MAX_STAGES,
    caps_from,
    check_amount,
    placement_from,
    profile_from,
    profile_to,
)
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.ir import MAX_COUNT, Action, Kind, Placement, Schedule
from zbcompile.schedule.problem import OBJECTIVES, TRANSPORTS, Problem
from zbcompile.schedule.solution import Certificate, Solution

__all__ = ["NAME", "ScheduleFile", "action_from", "action_to", "check_size", "dumps", "loads"]

NAME = "zbcompile.schedule"
VERSION = 1
_KINDS = {kind.value: kind for kind in Kind}
_NAMES = {kind: kind.value for kind in Kind}
_SMALL = 1 << 16


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
    """

    schedule: Schedule
    problem: Problem | None = None
    certificate: Certificate | None = None
    variants: tuple[int, ...] = ()
    origin: str = ""
    offered: Profile | None = None

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
            self.problem, self.schedule, self.certificate, self.variants, self.origin, self.offered
        )


def dumps(content: ScheduleFile | Solution | Schedule) -> str:
    """Return the text of a schedule file. The same content gives the same bytes."""
    if isinstance(content, Solution):
        content = ScheduleFile.of(content)
    elif isinstance(content, Schedule):
        content = ScheduleFile(content)
    schedule, problem, certificate = content.schedule, content.problem, content.certificate
    document: dict[str, object] = {
        "format": NAME,
        "version": VERSION,
        "placement": list(schedule.placement.rank_of),
        "microbatches": schedule.num_microbatches,
        "origin": readable(content.origin),
    }
    if certificate is not None:
        document["certificate"] = {
            "objective": certificate.objective,
            "value_ns": certificate.value_ns,
            "bound_ns": certificate.bound_ns,
            "method": certificate.method,
            "witness": plain(certificate.witness, "certificate.witness"),
        }
    if problem is not None:
        document["objective"] = problem.objective
        document["transport"] = problem.transport
        document["caps_bytes"] = list(problem.caps)
        document["variants"] = list(content.variants)
        document["profile"] = profile_to(_written_profile(content, problem))
    document["order"] = [[action_to(action) for action in row] for row in schedule.order]
    return format_json(document)


def loads(text: str, where: str = "schedule") -> ScheduleFile:
    """Read a schedule file.

    The order that is returned is well formed, but may be illegal: `zbcompile.schedule.check` judges it.

    Raises
    ------
    FormatError
        The text is broken, foreign or out of bounds; the message names the field.
    """
    fields = Fields(parse_json(text, where), where)
    fields.header(NAME, VERSION)
    placement = placement_from(
        items(fields.take("placement"), fields.at("placement"), high=MAX_STAGES), where
    )
    count = fields.integer("microbatches", low=1, high=MAX_COUNT)
    schedule = Schedule.of(placement, count, _order(fields, placement, count))
    check_size(schedule, where)
    problem = _problem(fields, placement, count)
    certificate = _certificate(fields)
    if certificate is not None and (problem is None or certificate.objective != problem.objective):
        raise FormatError("the certificate belongs to another problem", where=fields.at("certificate"))
    variants = tuple(
        integer(k, fields.at("variants"), high=MAX_STAGES) for k in fields.list("variants", high=MAX_STAGES)
    )
    if variants and len(variants) != placement.num_stages:
        raise FormatError(
            "one variant per stage",
            where=fields.at("variants"),
            needed=placement.num_stages,
            given=len(variants),
        )
    offered = None
    if problem is not None and problem.profile.offers_variants:
        offered = problem.profile
        chosen = variants or (0,) * placement.num_stages
        problem = problem.with_(profile=guarded(lambda: offered.choose(chosen), fields.at("variants")))
    result = ScheduleFile(schedule, problem, certificate, variants, fields.text("origin", ""), offered)
    fields.done()
    return result


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


def action_from(value: object, where: str, num_stages: int, num_microbatches: int) -> Action:
    """Read what `action_to` wrote.

    Raises
    ------
    FormatError
        The value is not an action, or a number is out of its range.
    """
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


def _order(fields: Fields, placement: Placement, num_microbatches: int) -> list[list[Action]]:
    where = fields.at("order")
    rows = items(fields.take("order"), where, high=MAX_STAGES)
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
                or action_from(v, f"{place}[{k}]", stages, num_microbatches)
                for k, v in enumerate(entries)
            ]
        )
    return order


def _well_formed(value: object, num_stages: int, num_microbatches: int) -> Action | None:
    """Read a well formed action quickly; return None for others: `action_from` names what is wrong."""
    if type(value) is not list or not 3 <= len(value) <= 4 or type(value[0]) is not str:
        return None
    kind, stage, microbatch, peer = _KINDS.get(value[0]), value[1], value[2], value[-1]
    if kind is None or (len(value) == 3) != kind.is_compute:
        return None
    if not type(stage) is type(microbatch) is type(peer) is int:
        return None
    if not (0 <= stage < num_stages and 0 <= microbatch < num_microbatches):
        return None
    if kind.is_compute:
        return Action(kind, stage, microbatch)
    return Action(kind, stage, microbatch, peer) if 0 <= peer < num_stages else None


def _problem(fields: Fields, placement: Placement, num_microbatches: int) -> Problem | None:
    profile = fields.optional("profile")
    objective = fields.one_of("objective", OBJECTIVES, OBJECTIVES[0])
    transport = fields.one_of("transport", TRANSPORTS, TRANSPORTS[0])
    caps = caps_from(fields.optional("caps_bytes"), fields.at("caps_bytes"))
    if profile is None:
        if caps:
            raise FormatError("caps without a profile say nothing", where=fields.at("caps_bytes"))
        return None
    costs = profile_from(profile, fields.at("profile"))
    check_amount(costs, num_microbatches, fields.at("profile"))
    limits = caps * placement.num_ranks if len(caps) == 1 else caps
    return guarded(
        lambda: Problem(costs, placement, num_microbatches, limits, objective, transport), fields.where
    )


def _certificate(fields: Fields) -> Certificate | None:
    value = fields.optional("certificate")
    if value is None:
        return None
    inner = Fields(value, fields.at("certificate"))
    objective = inner.one_of("objective", OBJECTIVES, "")
    value_ns, bound_ns = inner.integer("value_ns"), inner.integer("bound_ns")
    method, witness = inner.text("method", ""), inner.optional("witness")
    inner.done()
    evidence = plain({} if witness is None else witness, inner.at("witness"))
    if not isinstance(evidence, dict):
        raise FormatError("expected an object", where=inner.at("witness"))
    shown: Mapping[str, object] = evidence
    return guarded(lambda: Certificate(objective, value_ns, bound_ns, method, shown), inner.where)
