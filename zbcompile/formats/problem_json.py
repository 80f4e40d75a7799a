"""What a planning problem is made of, as JSON: the descriptions that profile and schedule files share.

A per-stage cost is one line in `_WAY` here and one in `zbcompile.schedule.costs.StageCost`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any

from zbcompile.errors import FormatError, UsageError
from zbcompile.formats.fields import guarded
from zbcompile.formats.records import Field, Part, Record
from zbcompile.formats.shapes import (
    RATE,
    SIZE,
    TEXT,
    TIME,
    Flag,
    ListOf,
    OneOrEach,
    Schema,
    Shape,
    Whole,
    Word,
)
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import MAX_COUNT, PLACEMENTS, Placement
from zbcompile.schedule.limits import check_amounts
from zbcompile.schedule.microbatches import MILLION, MOST_FACTOR_PPM, MicrobatchCost
from zbcompile.schedule.problem import ACCUMULATE, OBJECTIVES, TRANSPORTS, Problem
from zbcompile.schedule.spread import Spread

__all__ = [
    "ACCUMULATION",
    "CAPS",
    "COUNT",
    "EDGE",
    "KEPT_GRADIENTS",
    "LINK",
    "MAX_STAGES",
    "MICROBATCH_COSTS",
    "OBJECTIVE",
    "PLACEMENT",
    "PROFILE",
    "RANK",
    "STAGE",
    "TRANSPORT",
    "VARIANT",
    "PlacementOrName",
    "check_amount",
    "check_problem",
    "named_placement",
]

MAX_STAGES = 4096
_MAX_VARIANTS = 64
_MAX_LINKS = 1 << 16
_MAX_CELLS = 1 << 20
_MAX_SPREADS = 4 * MAX_STAGES

RANK = Whole(high=MAX_STAGES, name="rank")
COUNT = Whole(1, MAX_COUNT)
"""Microbatches of a step."""


def _runs(stages: tuple[StageCost, ...]) -> Iterator[tuple[int, StageCost]]:
    """Yield a profile's stages as a file states them: equal neighbours once, with their number."""
    for stage, equal in groupby(stages):
        yield len(list(equal)), stage


def _stages(runs: tuple[tuple[int, StageCost], ...]) -> tuple[StageCost, ...]:
    total = sum(repeat for repeat, _ in runs)
    if total > MAX_STAGES:
        raise FormatError("too many stages", needed=f"at most {MAX_STAGES}", given=total)
    return tuple(stage for repeat, stage in runs for _ in range(repeat))


def _chain(values: Mapping[str, Any]) -> tuple[Edge, ...]:
    return tuple(Edge(s, s + 1) for s in range(len(values["stages"]) - 1))


def _fused_ns(values: Mapping[str, Any]) -> int:
    return int(values["backward_input_ns"] + values["backward_weight_ns"])


def _rank_links(links: tuple[tuple[tuple[int, int], Link], ...]) -> tuple[tuple[tuple[int, int], Link], ...]:
    if len({pair for pair, _ in links}) != len(links):
        raise UsageError("a pair of ranks has two links")
    return links


_WAY = (
    Field("name", TEXT, "for people", default="", brief=True),
    Field("forward_ns", TIME, "time of F: the forward of one microbatch"),
    Field("backward_input_ns", TIME, "time of B: the gradient of the stage's inputs"),
    Field("backward_weight_ns", TIME, "time of W: the gradient of the stage's parameters"),
    Field("full_backward_ns", TIME, "time of a fused backward; left out: B + W", default=_fused_ns),
    Field("saved_bytes", SIZE, "held from the start of F until B ends"),
    Field("saved_for_weight_bytes", SIZE, "held from the end of B until W ends"),
    Field("static_bytes", SIZE, "parameters, gradients, optimizer state; counted in the cap", default=0),
    Field(
        "gradient_bytes",
        SIZE,
        "one gradient for each parameter, which may wait for its turn in the sum; left out: not counted",
        default=0,
        brief=True,
    ),
)
_ONCE_A_STEP = tuple(
    Field(name, TIME, text, default=0, brief=True)
    for name, text in (
        ("unshard_ns", "once a step: time to gather the stage's parameters"),
        ("reduce_ns", "once a step: time to reduce the stage's gradients over its replicas"),
        ("update_ns", "once a step: time of the optimizer's step for the stage"),
    )
)
VARIANT = Record(StageCost, _WAY, "another way to run the stage, for instance with recompute", name="variant")
STAGE = Record(
    StageCost,
    (
        *_WAY,
        *_ONCE_A_STEP,
        Field(
            "variants",
            ListOf(VARIANT, most=_MAX_VARIANTS),
            "choices for the planner when memory binds",
            default=(),
            null=True,
            brief=True,
        ),
    ),
)
_RUN = Record(
    lambda repeat, stage: (repeat, stage),
    (
        Field("repeat", Whole(1, MAX_STAGES), "this many equal stages in a row", default=1, brief=True),
        Part("stage", STAGE),
    ),
    "what one microbatch costs on one stage",
    name="stage",
    parts=lambda run: {"repeat": run[0], "stage": run[1]},
)
EDGE = Record(
    Edge,
    (
        Field("source", RANK),
        Field("target", RANK),
        Field("forward_bytes", SIZE, "size of the activation message", default=0),
        Field("backward_bytes", SIZE, "size of its gradient", default=0),
        Field("has_gradient", Flag(), "false when nothing flows back", default=True),
    ),
    "a flow of tensors from a stage to a later one",
    name="edge",
)
LINK = Record(
    Link,
    (
        Field("latency_ns", TIME, "time that every message takes", default=0),
        Field("bytes_per_second", RATE, "0: size costs nothing", default=0),
    ),
    "a connection between two ranks",
    name="link",
)
_RANK_LINK = Record(
    lambda source_rank, target_rank, link: ((source_rank, target_rank), link),
    (Field("source_rank", RANK), Field("target_rank", RANK), Part("link", LINK)),
    "the link of one directed pair of ranks",
    name="rank_link",
    parts=lambda entry: {"source_rank": entry[0][0], "target_rank": entry[0][1], "link": entry[1]},
)
_SPREAD = Record(
    Spread,
    (
        Field("place", TEXT, "what was measured, such as a stage"),
        Field("kind", Word("kind", ("F", "B", "W", "BW")), "the phase"),
        Field("fastest_ns", TIME, "the fastest repeat"),
        Field("median_ns", TIME, "the cost that is planned with"),
        Field("slowest_ns", TIME, "the slowest repeat"),
        Field("repeats", Whole(1, MAX_COUNT), "how often it was measured"),
    ),
    "a measured time whose repeats differ widely",
    name="spread",
)
PROFILE = Record(
    Profile,
    (
        Field("source", TEXT, "where the numbers come from", default=""),
        Field("stages", ListOf(_RUN, MAX_STAGES, least=1, build=_stages, take=_runs)),
        Field(
            "edges",
            ListOf(EDGE, _MAX_LINKS),
            "left out: each stage feeds the next, with messages of size 0",
            default=_chain,
            null=True,
            brief=True,
        ),
        Field(
            "link",
            LINK,
            "between any two different ranks that `links` does not name",
            default=Link(),
            null=True,
        ),
        Field(
            "links",
            ListOf(_RANK_LINK, _MAX_LINKS, build=_rank_links),
            "exceptions, at most one per pair",
            default=(),
            null=True,
            brief=True,
        ),
        Field("overhead_ns", TIME, "host time that every compute action adds", default=0),
        Field(
            "unsteady",
            ListOf(_SPREAD, _MAX_SPREADS),
            "measured times whose repeats differ widely, so that they may be wrong",
            default=(),
            null=True,
            brief=True,
        ),
    ),
    name="profile",
)

PLACEMENT = ListOf(RANK, MAX_STAGES, least=1, build=Placement, take=lambda placement: placement.rank_of)
"""The rank of every stage."""

_NAME = "|".join("linear(:1)?" if name == "linear" else name + "(:[0-9]{1,4})?" for name in PLACEMENTS)


class PlacementOrName(Shape[Placement | str]):
    """The rank of every stage, or a name that `named_placement` reads where their number is known."""

    def read(self, value: object, where: str) -> Placement | str:
        return value if isinstance(value, str) else PLACEMENT.read(value, where)

    def write(self, value: Placement | str) -> object:
        return value if isinstance(value, str) else PLACEMENT.write(value)

    def schema(self, definitions: Schema) -> Schema:
        name = {
            "description": "one stage per rank, or K stages per rank looped or in a V (K left out: 2)",
            "type": "string",
            "pattern": f"^({_NAME})$",
        }
        return {"oneOf": [PLACEMENT.schema(definitions), name]}


CAPS = Field(
    "caps_bytes",
    OneOrEach(SIZE, MAX_STAGES),
    "bytes per rank, or one number for every rank; null: no limit",
    default=(),
    key="caps",
    brief=True,
)
OBJECTIVE = Field(
    "objective",
    Word("objective", OBJECTIVES),
    f"what is made short; left out: {OBJECTIVES[0]}",
    default=None,
    brief=True,
)
TRANSPORT = Field(
    "transport",
    Word("transport", TRANSPORTS),
    f"the send mode; left out: {TRANSPORTS[0]}",
    default=None,
    brief=True,
)

ACCUMULATION = Field(
    "accumulate",
    Word("accumulate", ACCUMULATE),
    "how gradients are summed: in the order of the microbatches, or as they come, which takes less memory",
    default=ACCUMULATE[0],
    brief=True,
)
KEPT_GRADIENTS = Field(
    "kept_gradients",
    Flag(),
    "whether gradients of earlier steps are still held when a step begins; they count in the cap",
    default=False,
    brief=True,
)
_FACTORS = ListOf(Whole(high=MOST_FACTOR_PPM), MAX_STAGES, least=1)
_MICROBATCH = Record(
    MicrobatchCost,
    (
        Field(
            "time_ppm",
            _FACTORS,
            "of all times, in millionths: one for all stages or one per stage",
            default=(MILLION,),
        ),
        Field(
            "bytes_ppm",
            _FACTORS,
            "of saved bytes and messages, in the same way",
            default=(MILLION,),
            brief=True,
        ),
    ),
    "what one microbatch costs, as factors of the profile",
    name="microbatch",
)
MICROBATCH_COSTS = Field(
    "microbatch_costs",
    ListOf(_MICROBATCH, MAX_COUNT),
    "one entry per microbatch where they differ; left out: all cost what the profile says",
    default=(),
    brief=True,
)


def named_placement(text: str, num_stages: int) -> Placement:
    """Return the placement ``linear``, ``looped:K`` or ``v:K``: K stages per rank, 2 when left out.

    Raises
    ------
    FormatError
        The name is unknown, or K does not divide the number of stages.
    """
    name, _, tail = text.partition(":")
    each = int(tail or 1 + (name != "linear")) if re.fullmatch(_NAME, text) else 0
    if each < 1 or num_stages % each:
        raise FormatError(
            f"placement {text[:40]!r} does not fit {num_stages} stages",
            fix="use linear, looped:K or v:K where K divides the number of stages, or a list of ranks",
        )
    return Placement.named(name, num_stages // each, each)


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


def check_problem(problem: Problem, where: str) -> None:
    """Refuse microbatches that cost so much more than the profile that a step does not add up.

    Raises
    ------
    FormatError
        Names the sum.
    """
    if problem.microbatch_costs:
        for profile in problem.profiles():
            guarded(partial(check_amounts, profile, problem.num_microbatches), where)
