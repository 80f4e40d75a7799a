"""Profiles as JSON, format ``zbcompile.profile`` version 1; a file may state other parts of a problem too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbcompile.errors import FormatError
from zbcompile.formats.fields import (
    Choice,
    Fields,
    format_json,
    guarded,
    integer,
    items,
    parse_json,
    readable,
)
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import MAX_COUNT, Placement
from zbcompile.schedule.limits import check_amounts
from zbcompile.schedule.problem import OBJECTIVES, TRANSPORTS, Objective, Problem

__all__ = [
    "MAX_STAGES",
    "NAME",
    "ProfileFile",
    "dumps",
    "loads",
    "placement_from",
    "profile_from",
    "profile_to",
]

NAME = "zbcompile.profile"
VERSION = 1
MAX_STAGES = 4096
_MAX_VARIANTS = 64
_MAX_LINKS = 1 << 16
_MAX_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A profile and the other parts of a problem that the file states; None for those that it does not.

    Attributes
    ----------
    caps
        Bytes: one entry for all ranks or one per rank, None for no limit; empty when not stated.
    """

    profile: Profile
    placement: Placement | None = None
    num_microbatches: int | None = None
    caps: tuple[int | None, ...] = ()
    objective: Objective | None = None
    transport: str | None = None

    def problem(
        self,
        *,
        placement: Placement | None = None,
        num_microbatches: int | None = None,
        caps: Sequence[int | None] = (),
        objective: Objective | None = None,
        transport: str | None = None,
    ) -> Problem:
        """Return the problem that the file and the arguments state; arguments win.

        What neither states is linear placement, two microbatches per rank, no cap, span and ``async``.

        Raises
        ------
        UsageError
            The parts do not fit together.
        """
        where = placement or self.placement or Placement.linear(self.profile.num_stages)
        count = num_microbatches or self.num_microbatches or 2 * where.num_ranks
        limits = tuple(caps) or self.caps
        if len(limits) == 1:
            limits *= where.num_ranks
        return Problem(
            self.profile,
            where,
            count,
            limits,
            objective or self.objective or OBJECTIVES[0],
            transport or self.transport or TRANSPORTS[0],
        )


def loads(text: str, where: str = "profile") -> ProfileFile:
    """Read a profile file.

    Raises
    ------
    FormatError
        The text is broken, foreign or out of bounds; the message names the field.
    """
    fields = Fields(parse_json(text, where), where)
    fields.header(NAME, VERSION)
    profile = _profile(fields)
    stages = profile.num_stages
    raw_placement = fields.optional("placement")
    placement = (
        None if raw_placement is None else placement_from(raw_placement, fields.at("placement"), stages)
    )
    count = fields.optional("microbatches")
    result = ProfileFile(
        profile,
        placement,
        None if count is None else integer(count, fields.at("microbatches"), low=1, high=MAX_COUNT),
        caps_from(fields.optional("caps_bytes"), fields.at("caps_bytes")),
        _choice(fields, "objective", OBJECTIVES),
        _choice(fields, "transport", TRANSPORTS),
    )
    fields.done()
    check_amount(profile, result.num_microbatches or 1, where)
    guarded(result.problem, where)
    return result


def dumps(content: ProfileFile | Profile) -> str:
    """Return the text of a profile file. The same content gives the same bytes."""
    file = ProfileFile(content) if isinstance(content, Profile) else content
    document: dict[str, object] = {"format": NAME, "version": VERSION}
    if file.num_microbatches is not None:
        document["microbatches"] = file.num_microbatches
    if file.placement is not None:
        document["placement"] = list(file.placement.rank_of)
    if file.caps:
        document["caps_bytes"] = list(file.caps)
    if file.objective is not None:
        document["objective"] = file.objective
    if file.transport is not None:
        document["transport"] = file.transport
    document.update(profile_to(file.profile))
    return format_json(document)


def profile_to(profile: Profile) -> dict[str, object]:
    """Return a profile as plain values; equal neighbouring stages are written once, with ``repeat``."""
    result: dict[str, object] = {"source": readable(profile.source), "stages": list(_runs(profile.stages))}
    chain = tuple(Edge(s, s + 1) for s in range(profile.num_stages - 1))
    if profile.edges != chain:
        result["edges"] = [
            {
                "source": e.source,
                "target": e.target,
                "forward_bytes": e.forward_bytes,
                "backward_bytes": e.backward_bytes,
                "has_gradient": e.has_gradient,
            }
            for e in profile.edges
        ]
    result["link"] = _link_to(profile.link)
    if profile.links:
        result["links"] = [
            {"source_rank": a, "target_rank": b, **_link_to(link)} for (a, b), link in profile.links
        ]
    result["overhead_ns"] = profile.overhead_ns
    return result


def profile_from(value: object, where: str) -> Profile:
    """Read what `profile_to` wrote.

    Raises
    ------
    FormatError
        The value is not a profile; the message names the field.
    """
    fields = Fields(value, where)
    profile = _profile(fields)
    fields.done()
    return profile


def placement_from(value: object, where: str, num_stages: int | None = None) -> Placement:
    """Read a list with the rank of every stage or, where the number of stages is given, a name.

    Raises
    ------
    FormatError
        The value is neither, or leaves a rank without a stage.
    """
    if isinstance(value, str) and num_stages is not None:
        return guarded(lambda: named_placement(value, num_stages), where)
    ranks = [
        integer(r, f"{where}[{i}]", high=MAX_STAGES)
        for i, r in enumerate(items(value, where, high=MAX_STAGES))
    ]
    return guarded(lambda: Placement(tuple(ranks)), where)


def named_placement(text: str, num_stages: int) -> Placement:
    """Return the placement ``linear``, ``looped:K`` or ``v:K``: K stages per rank, 2 when left out.

    Raises
    ------
    FormatError
        The name is unknown, or K does not divide the number of stages.
    """
    name, _, tail = text.partition(":")
    each = 1 if name == "linear" else 2
    if tail:
        each = int(tail) if tail.isascii() and tail.isdigit() and len(tail) < 5 else 0
    if name not in ("linear", "looped", "v") or each < 1 or num_stages % each:
        raise FormatError(
            f"placement {text[:40]!r} does not fit {num_stages} stages",
            fix="use linear, looped:K or v:K where K divides the number of stages, or a list of ranks",
        )
    return Placement.named(name, num_stages // each, each)


def caps_from(value: object, where: str) -> tuple[int | None, ...]:
    """Read caps in bytes: a number for all ranks, a list with a number or null per rank, or null for none."""
    if value is None:
        return ()
    if not isinstance(value, list):
        return (integer(value, where),)
    entries = items(value, where, high=MAX_STAGES)
    return tuple(None if v is None else integer(v, f"{where}[{i}]") for i, v in enumerate(entries))


def check_amount(profile: Profile, num_microbatches: int, where: str) -> None:
    """Refuse steps of too many actions, and amounts whose sum over a step is more than a file can say.

    Raises
    ------
    FormatError
        The profile is too large for the number of microbatches; names the sum.
    """
    cells = profile.num_stages * num_microbatches
    if cells > _MAX_CELLS:
        raise FormatError(
            "too many stages times microbatches", where=where, needed=f"at most {_MAX_CELLS}", given=cells
        )
    guarded(lambda: check_amounts(profile, num_microbatches), where)


def _choice(fields: Fields, name: str, choices: Sequence[Choice]) -> Choice | None:
    return fields.one_of(name, choices, "") if fields.has(name) else None


def _profile(fields: Fields) -> Profile:
    stages: list[StageCost] = []
    for index, entry in enumerate(fields.list("stages", high=MAX_STAGES)):
        where = f"{fields.at('stages')}[{index}]"
        stage, repeat = _stage(entry, where, nested=False)
        stages.extend([stage] * repeat)
        if len(stages) > MAX_STAGES:
            raise FormatError("too many stages", where=where, needed=f"at most {MAX_STAGES}")
    edges = tuple(
        _edge(entry, f"{fields.at('edges')}[{i}]")
        for i, entry in enumerate(fields.list("edges", high=_MAX_LINKS))
    )
    link = fields.optional("link")
    links = [
        _pair(entry, f"{fields.at('links')}[{i}]")
        for i, entry in enumerate(fields.list("links", high=_MAX_LINKS))
    ]
    if len({pair for pair, _ in links}) != len(links):
        raise FormatError("a pair of ranks has two links", where=fields.at("links"))
    overhead_ns, source = fields.integer("overhead_ns", 0), fields.text("source", "")
    return guarded(
        lambda: Profile(
            tuple(stages),
            edges,
            Link() if link is None else _link(Fields(link, fields.at("link"))),
            tuple(links),
            overhead_ns,
            source,
        ),
        fields.where,
    )


def _stage(value: object, where: str, *, nested: bool) -> tuple[StageCost, int]:
    fields = Fields(value, where)
    repeat = 1 if nested else fields.integer("repeat", 1, low=1, high=MAX_STAGES)
    backward_input_ns = fields.integer("backward_input_ns")
    backward_weight_ns = fields.integer("backward_weight_ns")
    variants = (
        ()
        if nested
        else tuple(
            _stage(entry, f"{where}.variants[{k}]", nested=True)[0]
            for k, entry in enumerate(fields.list("variants", high=_MAX_VARIANTS))
        )
    )
    stage = StageCost(
        forward_ns=fields.integer("forward_ns"),
        backward_input_ns=backward_input_ns,
        backward_weight_ns=backward_weight_ns,
        full_backward_ns=fields.integer("full_backward_ns", backward_input_ns + backward_weight_ns),
        saved_bytes=fields.integer("saved_bytes"),
        saved_for_weight_bytes=fields.integer("saved_for_weight_bytes"),
        static_bytes=fields.integer("static_bytes", 0),
        name=fields.text("name", ""),
        variants=variants,
    )
    fields.done()
    return stage, repeat


def _stage_to(stage: StageCost) -> dict[str, object]:
    result: dict[str, object] = {"name": readable(stage.name)} if stage.name else {}
    for name in (
        "forward_ns",
        "backward_input_ns",
        "backward_weight_ns",
        "full_backward_ns",
        "saved_bytes",
        "saved_for_weight_bytes",
        "static_bytes",
    ):
        result[name] = getattr(stage, name)
    if stage.variants:
        result["variants"] = [_stage_to(v) for v in stage.variants]
    return result


def _runs(stages: Sequence[StageCost]) -> Iterator[dict[str, object]]:
    start = 0
    for index in range(1, len(stages) + 1):
        if index == len(stages) or stages[index] != stages[start]:
            head: dict[str, object] = {"repeat": index - start} if index - start > 1 else {}
            yield {**head, **_stage_to(stages[start])}
            start = index


def _edge(value: object, where: str) -> Edge:
    fields = Fields(value, where)
    source, target = fields.integer("source", high=MAX_STAGES), fields.integer("target", high=MAX_STAGES)
    forward_bytes, backward_bytes = fields.integer("forward_bytes", 0), fields.integer("backward_bytes", 0)
    has_gradient = fields.flag("has_gradient", True)
    fields.done()
    return guarded(lambda: Edge(source, target, forward_bytes, backward_bytes, has_gradient), where)


def _link_to(link: Link) -> dict[str, object]:
    return {"latency_ns": link.latency_ns, "bytes_per_second": link.bytes_per_second}


def _link(fields: Fields) -> Link:
    link = Link(fields.integer("latency_ns", 0), fields.integer("bytes_per_second", 0))
    fields.done()
    return link


def _pair(value: object, where: str) -> tuple[tuple[int, int], Link]:
    fields = Fields(value, where)
    pair = fields.integer("source_rank", high=MAX_STAGES), fields.integer("target_rank", high=MAX_STAGES)
    return pair, _link(fields)
