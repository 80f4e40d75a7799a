"""Reader, writer and schema do what a description says: random records, and files broken at random."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.places import GOLDEN
from zbcompile.errors import FormatError, UsageError
from zbcompile.formats import (
    checkpoint_json,
    measured_json,
    problem_json,
    profile_json,
    schedule_json,
    selftest_json,
)
from zbcompile.formats.records import Document, Field, Part, Record
from zbcompile.formats.schemas import SCHEMAS, schema_text
from zbcompile.formats.shapes import (
    TEXT,
    Flag,
    Json,
    JsonObject,
    ListOf,
    OneOrEach,
    Shape,
    Whole,
    Word,
)
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import PLACEMENTS, Kind
from zbcompile.schedule.problem import OBJECTIVES, TRANSPORTS
from zbcompile.schedule.solution import Certificate

READERS: dict[str, Callable[[str], object]] = {
    "schedule": schedule_json.loads,
    "profile": profile_json.loads,
    "measured": measured_json.loads,
    "checkpoint": checkpoint_json.loads,
    "selftest": selftest_json.loads,
}
FREE = {"witness", "figures", "versions"}
"""Objects that may have any fields."""
VALIDATORS = {name: jsonschema.Draft202012Validator(json.loads(schema_text(name))) for name in SCHEMAS}
SEEDS = st.integers(0, 2**32)


@dataclasses.dataclass(frozen=True)
class Described:
    """A shape, and a maker of values that it stands for."""

    shape: Shape[Any]
    value: Callable[[Random], Any]


def word(rng: Random) -> str:
    return "".join(rng.choice("abcdefgµ≤🐍 ") for _ in range(rng.randrange(9)))


def plain(rng: Random, depth: int = 2) -> Any:
    """Return any JSON value."""
    way = rng.randrange(8 if depth else 5)
    if way >= 6:
        return {word(rng): plain(rng, depth - 1) for _ in range(rng.randrange(3))}
    if way == 5:
        return [plain(rng, depth - 1) for _ in range(rng.randrange(3))]
    return (None, rng.random() < 0.5, rng.randrange(-9, 9), word(rng), 0.5)[way]


def anything(rng: Random) -> Any:
    """Return a value that is mostly out of place."""
    hostile = (1.5, 10**30, -1, "\x1b[2J", "x" * 1001, [[]], [None] * 70, {"a": 1}, None)
    return copy.deepcopy(rng.choice(hostile)) if rng.random() < 0.5 else plain(rng)


def leaf(rng: Random) -> Described:
    low = rng.randrange(-9, 9)
    high = low + rng.randrange(9)
    return rng.choice(
        (
            Described(Whole(low, high), lambda r: r.randint(low, high)),
            Described(TEXT, word),
            Described(Flag(), lambda r: r.random() < 0.5),
            Described(Word("thing", ("a", "b")), lambda r: r.choice("ab")),
            Described(Json(), plain),
            Described(JsonObject(), lambda r: {word(r): plain(r)}),
        )
    )


def some(rng: Random, depth: int) -> Described:
    """Return a shape of any kind."""
    way = rng.randrange(5) if depth else 0
    if way < 2:
        return leaf(rng)
    if way == 2:
        return record(rng, depth - 1)
    inner = some(rng, depth - 1)
    if way == 3:
        shape: Shape[Any] = ListOf(inner.shape, most=3)
        return Described(shape, lambda r: tuple(inner.value(r) for _ in range(r.randrange(4))))
    if isinstance(inner.shape, (Json, ListOf, OneOrEach)):  # a list would be taken for one value per rank
        return inner
    either = OneOrEach(inner.shape, most=3)
    return Described(either, lambda r: tuple(r.choice((None, inner.value(r))) for _ in range(r.randrange(4))))


def record(rng: Random, depth: int = 2) -> Described:
    """Return a record whose values are dictionaries; its last fields stand in a part."""
    fields, makers = [], {}
    for name in rng.sample("abcdefgh", rng.randrange(1, 6)):
        described = some(rng, depth)
        makers[name], optional = described.value, rng.random() < 0.5
        fields.append(
            Field(
                name,
                described.shape,
                rng.choice(("", "what it is")),
                **({"default": fixed(described.value(rng))} if optional else {}),
                key=rng.choice(("", name.upper())),
                brief=optional and rng.random() < 0.5,
            )
        )
    cut = rng.randrange(len(fields) + 1)
    inner = Record(dict, tuple(fields[cut:]), parts=dict)

    def value(r: Random) -> dict[str, Any]:
        made = [{field.key: makers[field.name](r) for field in part} for part in (fields[:cut], fields[cut:])]
        return {**made[0], "part": made[1]}

    shape = Record(dict, (*fields[:cut], Part("part", inner)), parts=dict)
    return Described(shape, value)


def fixed(value: Any) -> Callable[[object], Any]:
    return lambda _: value


def document_of(described: Described) -> Document[Any]:
    assert isinstance(described.shape, Record)
    return Document("test.thing", 3, "a thing", described.shape)


def validator_of(document: Document[Any]) -> jsonschema.Draft202012Validator:
    schema = json.loads(document.json_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@given(SEEDS)
def test_any_record_survives_its_file_and_matches_its_schema(seed: int) -> None:
    rng = Random(seed)
    described = record(rng)
    document = document_of(described)
    validator = validator_of(document)
    for _ in range(5):
        value = described.value(rng)
        text = document.dumps(value)
        assert document.loads(text, "here") == value
        assert document.dumps(document.loads(text, "here")) == text
        validator.validate(json.loads(text))


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inner:
        yield (*here, key)
        yield from places(entry, (*here, key))


def at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def broken(rng: Random, whole: Any) -> Any:
    """Break a JSON value at one or two places: other values, missing and unknown fields, null."""
    whole = copy.deepcopy(whole)
    for _ in range(rng.choice((1, 1, 1, 2))):
        found = list(places(whole))
        *above, last = rng.choice(found)
        target, way = at(whole, tuple(above)), rng.choice(("null", "delete", "other", "copy", "add"))
        if way == "delete":
            del target[last]
        elif way == "add" and isinstance(target, dict):
            target[rng.choice("abcdefgh")] = anything(rng)
        elif way == "copy":
            target[last] = copy.deepcopy(at(whole, rng.choice(found)))
        else:
            target[last] = None if way == "null" else anything(rng)
    return whole


def takes(read: Callable[[str], object], value: Any) -> bool:
    try:
        read(json.dumps(value))
    except FormatError:
        return False
    return True


@given(SEEDS)
def test_what_the_schema_of_any_record_refuses_its_reader_refuses(seed: int) -> None:
    """The other direction is looser: a schema cannot say that text is printable or that 1.0 is no number."""
    rng = Random(seed)
    described = record(rng)
    document = document_of(described)
    validator, value = validator_of(document), json.loads(document.dumps(described.value(rng)))
    for _ in range(10):
        wrong = broken(rng, value)
        if takes(lambda text: document.loads(text, "here"), wrong):
            validator.validate(wrong)


def golden(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


WAY = {
    "forward_ns": 1,
    "backward_input_ns": 1,
    "backward_weight_ns": 1,
    "saved_bytes": 1,
    "saved_for_weight_bytes": 1,
}
RICH: dict[str, Any] = {
    "placement": "v",
    "stages": [{**WAY, "repeat": 3, "name": "a", "variants": [WAY, {**WAY, "static_bytes": 2}]}, WAY],
    "edges": [{"source": k, "target": k + 1, "forward_bytes": k, "has_gradient": k > 0} for k in range(3)],
    "links": [{"source_rank": 0, "target_rank": 1, "latency_ns": 4}],
    "caps_bytes": [9000, None],
    "microbatch_costs": [{"time_ppm": [1_300_000]}, {"time_ppm": [5], "bytes_ppm": [1, 2, 3, 4]}],
}


@pytest.mark.parametrize("name", SCHEMAS)
@given(seed=SEEDS)
def test_what_a_schema_refuses_the_reader_refuses(name: str, seed: int) -> None:
    """The same, for the formats: what a reader takes is what its schema takes."""
    rng, value = Random(seed), golden(name)
    if name == "profile" and rng.random() < 0.7:
        value |= copy.deepcopy(RICH)
    elif name == "schedule" and rng.random() < 0.7:
        value["profile"]["stages"] = [{**WAY, "repeat": 2, "variants": [WAY]}]
        value["certificate"]["lineage"] = ["list_schedule", "anneal"]
        value["microbatch_costs"] = [{"time_ppm": [1, 2]}, {"bytes_ppm": [3]}]
    assert takes(READERS[name], value)
    for _ in range(10):
        wrong = broken(rng, value)
        if takes(READERS[name], wrong):
            VALIDATORS[name].validate(wrong)


@given(SEEDS)
def test_reader_and_schema_of_any_record_refuse_missing_and_unknown_fields(seed: int) -> None:
    rng = Random(seed)
    described = record(rng)
    document = document_of(described)
    validator, value = validator_of(document), json.loads(document.dumps(described.value(rng)))
    outer, inner = document.record.fields[:-1], document.record.fields[-1].record.fields
    wrong = [{k: v for k, v in value.items() if k != f.name} for f in (*outer, *inner) if f.needed]
    for faulty in (*wrong, value | {"unknown": 1}, value | {"version": 4}, value | {"format": "other"}):
        assert not validator.is_valid(faulty)
        assert not takes(lambda text: document.loads(text, "here"), faulty)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_object_of_a_format_refuses_unknown_fields(name: str) -> None:
    value = golden(name) | (RICH if name == "profile" else {})
    objects = [place for place in places(value) if isinstance(at(value, place), dict)]
    for place in [(), *objects]:
        wrong = copy.deepcopy(value)
        at(wrong, place)["unknown"] = 1
        assert VALIDATORS[name].is_valid(wrong) == takes(READERS[name], wrong) == bool(FREE & set(place))


NULLS = {
    "profile": ("microbatches", "placement", "caps_bytes", "edges", "link", "links"),
    "schedule": ("certificate", "variants"),
}


@pytest.mark.parametrize(("name", "field"), [(n, f) for n, fields in NULLS.items() for f in fields])
def test_null_says_the_same_as_leaving_a_field_out(name: str, field: str) -> None:
    value = golden(name)
    value.pop(field, None)
    without = READERS[name](json.dumps(value))
    VALIDATORS[name].validate(value | {field: None})
    assert READERS[name](json.dumps(value | {field: None})) == without


def keys(record: Record[Any]) -> set[str]:
    """The values of a record, by their names in Python."""
    return {field.key for field in record.fields}


def test_every_part_of_a_problem_is_described() -> None:
    """A field of a dataclass that no format describes would be lost without a word."""
    described: list[tuple[Any, Record[Any]]] = [
        (StageCost, problem_json.STAGE),
        (Edge, problem_json.EDGE),
        (Link, problem_json.LINK),
        (Profile, problem_json.PROFILE),
        (Certificate, schedule_json.CERTIFICATE),
        (profile_json.ProfileFile, profile_json.FILE.record),
        (measured_json.Measured, measured_json.FILE.record),
        (checkpoint_json.CheckpointFile, checkpoint_json.FILE.record),
    ]
    for made, record in described:
        assert keys(record) == {field.name for field in dataclasses.fields(made) if field.init}
    once_a_step = ("unshard_ns", "reduce_ns", "update_ns")
    assert keys(problem_json.VARIANT) == keys(problem_json.STAGE) - {"variants", *once_a_step}


def test_schemas_list_the_words_that_the_code_knows() -> None:
    schema = json.loads(schema_text("schedule"))
    assert schema["properties"]["objective"]["enum"] == list(OBJECTIVES)
    assert schema["properties"]["transport"]["enum"] == list(TRANSPORTS)
    kinds = [row["prefixItems"][0]["enum"] for row in schema["$defs"]["action"]["oneOf"]]
    assert sorted(sum(kinds, [])) == sorted(kind.value for kind in Kind)
    name = json.loads(schema_text("profile"))["properties"]["placement"]["anyOf"][0]["oneOf"][1]
    for word in PLACEMENTS:
        profile = golden("profile") | {"placement": word}
        profile["stages"][0]["repeat"] = 4
        jsonschema.validate(word, name)
        assert takes(READERS["profile"], profile)
        assert not takes(READERS["profile"], profile | {"placement": word + ":"})


def test_the_lineage_of_a_certificate_is_optional_short_and_printable() -> None:
    value = golden("schedule")
    assert "lineage" not in value["certificate"]
    assert schedule_json.loads(json.dumps(value)).certificate.lineage == ()
    value["certificate"]["lineage"] = ["list_schedule", "fold", "anneal"]
    file = schedule_json.loads(json.dumps(value))
    assert file.certificate.lineage == ("list_schedule", "fold", "anneal")
    assert json.loads(schedule_json.dumps(file)) == value
    for wrong, reason in (
        ("list_schedule", "expected a list"),
        (None, "expected a list"),
        ([1], r"expected text \(schedule.certificate.lineage\[0\]\)"),
        (["\x1b[2J"], "expected printable text"),
        (["a"] * 65, "too many entries"),
    ):
        value["certificate"]["lineage"] = wrong
        assert not VALIDATORS["schedule"].is_valid(value) or wrong == ["\x1b[2J"]
        with pytest.raises(FormatError, match=reason):
            schedule_json.loads(json.dumps(value))
    long = dataclasses.replace(file.certificate, lineage=("a",) * 65)
    with pytest.raises(UsageError, match=r"too many entries \(certificate.lineage\)"):
        schedule_json.dumps(dataclasses.replace(file, certificate=long))
