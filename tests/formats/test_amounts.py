"""Amounts with units in profiles, and profiles in TOML."""

from __future__ import annotations

import json
import re
import tomllib
from fractions import Fraction

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbcompile.errors import FormatError, UsageError
from zbcompile.formats import profile_json
from zbcompile.formats.amounts import RATE, SIZE, TIME, Unit
from zbcompile.formats.schemas import schema_text
from zbcompile.schedule.limits import MAX_AMOUNT

SCHEMA = jsonschema.Draft202012Validator(json.loads(schema_text("profile")))
TOML = """
format = "zbcompile.profile"
version = 1
microbatches = 8
caps_bytes = ["12 GiB", "none"]
[link]
latency_ns = "20us"
bytes_per_second = "25 GB/s"
[[stages]]
repeat = 2
forward_ns = "18.5ms"
backward_input_ns = "18.1 ms"
backward_weight_ns = 9300000
saved_bytes = "1.5GiB"
saved_for_weight_bytes = "1.3GiB"
"""


@given(st.sampled_from([TIME, SIZE, RATE]), st.integers(0, 10**6), st.integers(0, 9), st.data())
def test_an_amount_is_read_exactly(unit: Unit, number: int, shift: int, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(unit.sizes)))
    exact = Fraction(number, 10**shift) * unit.sizes[name]
    text = f"{number // 10**shift}.{number % 10**shift:0{shift}d}" if shift else str(number)
    if exact > MAX_AMOUNT or (exact.denominator > 1 and unit is TIME):
        with pytest.raises(UsageError):
            unit.read(f"{text} {name}")
        return
    assert unit.read(text + name) == unit.read(f"{text} {name}") == -(-exact.numerator // exact.denominator)


@pytest.mark.parametrize(
    ("unit", "text", "words"),
    [
        (TIME, "18.5", "18.5 has no unit"),
        (TIME, "0.5ns", "no whole number of ns"),
        (TIME, "5 min", "'min' is no unit of a time"),
        (TIME, "5e3ms", "is no unit"),
        (TIME, "-5ms", "is no time"),
        (TIME, " 5ms", "is no time"),
        (TIME, "5  ms", "is no time"),
        (TIME, ".ms", "is no time"),
        (TIME, "5.ms", "is no unit"),
        (TIME, ".5", "has no unit"),
        (TIME, "9007199255s", "too much"),
        (SIZE, "2", "2 has no unit"),
        (SIZE, "2G", "'G' is no unit of a size"),
        (SIZE, "2KB", "'KB' is no unit"),
        (SIZE, "2Gb", "'Gb' is no unit"),
        (SIZE, "2gib", "'gib' is no unit"),
        (RATE, "25GB", "no unit of a rate"),
        (RATE, "200Gb/s", "no unit of a rate"),
    ],
)
def test_what_could_be_meant_otherwise_is_refused(unit: Unit, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        unit.read(text)


@pytest.mark.parametrize(("unit", "text", "amount"), [(TIME, ".6ms", 600_000), (SIZE, ".5 GiB", 1 << 29)])
def test_an_amount_may_begin_with_its_point(unit: Unit, text: str, amount: int) -> None:
    assert unit.read(text) == amount
    assert re.search(unit.pattern, text)


def test_toml_and_json_say_the_same_and_the_schema_takes_both() -> None:
    found = profile_json.loads(TOML, "costs.toml")
    document = tomllib.loads(TOML)
    SCHEMA.validate(document)
    assert profile_json.loads(json.dumps(document), "costs.json") == found
    assert profile_json.loads(TOML, "standard input") == found
    stage = found.profile.stages[1]
    assert (stage.forward_ns, stage.backward_input_ns, stage.full_backward_ns) == (
        18_500_000,
        18_100_000,
        27_400_000,
    )
    assert stage.saved_for_weight_bytes == 1_395_864_372  # 1.3 GiB are 1395864371.2 bytes
    assert found.profile.link.bytes_per_second == 25 * 10**9
    assert found.caps == (12 << 30, None)
    assert profile_json.loads(profile_json.dumps(found)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TOML.replace("18.5ms", "18.5"), r"has no unit.*costs.toml.stages\[0\].forward_ns"),
        (TOML.replace('"18.5ms"', "18.5"), "whole number"),
        (TOML.replace('"18.5ms"', "1979-05-27"), "whole number"),
        (TOML.replace("repeat = 2", "repeat = "), "not TOML: .*line 10"),
        (TOML + "repeat = 3", "not TOML"),
        (TOML.replace("zbcompile.profile", "x"), "not a zbcompile.profile file"),
        ("x = " + "[" * 20_000 + "]" * 20_000, "nested too deeply"),
        ("x = " + "9" * 5_000, "not TOML"),
        ("x = 1\n" * 700_000, "too long for TOML"),
        ("", "not a zbcompile.profile file"),
    ],
)
def test_broken_toml_is_refused_with_the_place(text: str, words: str) -> None:
    with pytest.raises(FormatError) as caught:
        profile_json.loads(text, "costs.toml")
    import re

    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)
