"""Files from someone else: whatever they say, a `FormatError` that names the place, no memory spent first."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.places import GOLDEN
from zbcompile.errors import FormatError
from zbcompile.formats import (
    checkpoint_json,
    measured_json,
    problem_json,
    profile_json,
    schedule_json,
    torch_csv,
)
from zbcompile.formats.detect import load_schedule
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Certificate, Solution

READERS: dict[str, Callable[[str], object]] = {
    "schedule": schedule_json.loads,
    "profile": profile_json.loads,
    "measured": measured_json.loads,
    "checkpoint": checkpoint_json.loads,
}
BIG = 10**30


def document(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


BAD_TEXT = [
    "",
    "{",
    "[]",
    "null",
    "1" * 5000,
    "[" * 100_000,
    '{"a": 1, "a": 2}',
    '{"format": NaN}',
    '{"format": "zbcompile.schedule", "version": Infinity}',
    "\x00",
    '{"format": "other", "version": 1}',
    '{"format": "zbcompile.schedule"}',
    '{"format": {"zbcompile.schedule": 1}, "version": 1}',
]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", BAD_TEXT, ids=range(len(BAD_TEXT)))
def test_broken_and_foreign_text_is_refused(name: str, text: str) -> None:
    with pytest.raises(FormatError):
        READERS[name](text)


@pytest.mark.parametrize("name", READERS)
def test_each_reader_refuses_the_other_formats_by_name(name: str) -> None:
    for other in READERS:
        if other != name:
            with pytest.raises(FormatError, match=f"not a zbcompile.{name} file"):
                READERS[name](json.dumps(document(other)))


@pytest.mark.parametrize("name", READERS)
def test_other_versions_are_refused(name: str) -> None:
    own = document(name)["version"]
    for version in (own - 1, own + 1, str(own), own + 0.5, float(own), None, True, BIG):
        text = json.dumps({**document(name), "version": version})
        with pytest.raises(FormatError, match="version"):
            READERS[name](text)


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [here] if here else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inner:
        found += paths(entry, (*here, key))
    return found


def refusal(read: Callable[[str], object], text: str) -> str:
    """The reader's refusal, or nothing when it took the text. Any other exception goes through."""
    try:
        read(text)
    except FormatError as error:
        return str(error)
    return ""


REPLACEMENTS = (
    None,
    True,
    -1,
    1.5,
    BIG,
    -BIG,
    "",
    "\x1b[2J",
    "x" * 5000,
    [],
    {},
    [[]],
    {"a": 1},
    [None] * 5000,
)


@given(st.sampled_from(sorted(READERS)), st.data())
def test_one_wrong_value_anywhere_is_refused_or_harmless(name: str, data: st.DataObject) -> None:
    value = document(name)
    path = data.draw(st.sampled_from(paths(value)))
    replacement = data.draw(st.sampled_from(REPLACEMENTS))
    target = value
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = copy.deepcopy(replacement)
    message = refusal(READERS[name], json.dumps(value))
    assert all(line.isprintable() for line in message.splitlines())


@given(st.sampled_from(sorted(READERS)), st.data())
def test_one_missing_or_added_field_is_refused_or_harmless(name: str, data: st.DataObject) -> None:
    value = document(name)
    path = data.draw(st.sampled_from([p for p in paths(value) if isinstance(p[-1], str)]))
    target = value
    for key in path[:-1]:
        target = target[key]
    if data.draw(st.booleans()):
        del target[path[-1]]
        refusal(READERS[name], json.dumps(value))
    elif "witness" not in path:
        target["forward_us"] = 3
        with pytest.raises(FormatError, match="unknown field 'forward_us'"):
            READERS[name](json.dumps(value))


def change(name: str, edit: Callable[[Any], None]) -> str:
    value = document(name)
    edit(value)
    return json.dumps(value)


WRONG_SCHEDULES: dict[str, tuple[Callable[[Any], None], str]] = {
    "unknown kind": (lambda v: v["order"][0].insert(0, ["explode", 0, 0]), "unknown kind 'explode'"),
    "code for a kind": (lambda v: v["order"][0].insert(0, ["__import__('os')", 0, 0]), "unknown kind"),
    "kind that is a list": (lambda v: v["order"][0].insert(0, [["forward"], 0, 0]), "unknown kind"),
    "code for a stage": (lambda v: v["order"][0].insert(0, ["forward", "0); exit(", 0]), "whole number"),
    "stage out of range": (lambda v: v["order"][0].insert(0, ["forward", 2, 0]), "out of range"),
    "microbatch out of range": (lambda v: v["order"][0].insert(0, ["forward", 0, 2]), "out of range"),
    "peer for compute": (lambda v: v["order"][0].insert(0, ["forward", 0, 0, 1]), "no peer"),
    "no peer for a send": (lambda v: v["order"][0].insert(0, ["send_f", 0, 0]), "a peer"),
    "short action": (lambda v: v["order"][0].insert(0, ["forward", 0]), "expected an action"),
    "hole in the ranks": (lambda v: v.update(placement=[0, 2]), "without a hole"),
    "too few rows": (lambda v: v["order"].pop(), "one row of actions per rank"),
    "placement of another profile": (
        lambda v: v.update(placement=[0, 1, 1]),
        "differ in the number of stages",
    ),
    "bound above the value": (lambda v: v["certificate"].update(bound_ns=10**6), "lower bound"),
    "certificate of another objective": (lambda v: v["certificate"].update(objective="makespan"), "another"),
    "caps for other ranks": (lambda v: v.update(caps_bytes=[1, 2, 3]), "one cap per rank"),
    "caps alone": (lambda v: v.update(profile=None, certificate=None), "caps without a profile"),
    "variants for other stages": (lambda v: v.update(variants=[0]), "one variant per stage"),
    "deep witness": (lambda v: v["certificate"].update(witness=deep(50)), "nested too deeply"),
    "witness no object": (lambda v: v["certificate"].update(witness=[1]), "expected an object"),
    "control characters": (lambda v: v.update(origin="\x1b]0;title\x07"), "printable"),
}


def deep(levels: int) -> dict[str, Any]:
    return {} if levels == 0 else {"a": deep(levels - 1)}


@pytest.mark.parametrize("case", WRONG_SCHEDULES)
def test_wrong_schedules_are_refused_with_the_reason(case: str) -> None:
    edit, reason = WRONG_SCHEDULES[case]
    with pytest.raises(FormatError, match=reason):
        schedule_json.loads(change("schedule", edit))


WAY = {
    "forward_ns": 1,
    "backward_input_ns": 1,
    "backward_weight_ns": 1,
    "saved_bytes": 1,
    "saved_for_weight_bytes": 1,
}
WRONG_PROFILES: dict[str, tuple[Callable[[Any], None], str]] = {
    "no stage": (lambda v: v.update(stages=[]), "at least one stage"),
    "negative time": (lambda v: v["stages"][0].update(forward_ns=-1), "out of range"),
    "time that is a fraction": (lambda v: v["stages"][0].update(forward_ns=1.0), "whole number"),
    "variant in a variant": (
        lambda v: v["stages"][0].update(variants=[{**v["stages"][0], "variants": []}]),
        "unknown field",
    ),
    "backward edge": (lambda v: v.update(edges=[{"source": 1, "target": 0}]), "to a later one"),
    "edge to nowhere": (lambda v: v.update(edges=[{"source": 0, "target": 9}]), "does not exist"),
    "edge twice": (lambda v: v.update(edges=[{"source": 0, "target": 1}] * 2), "same pair"),
    "link twice": (lambda v: v.update(links=[{"source_rank": 0, "target_rank": 1}] * 2), "two links"),
    "too many stages": (lambda v: v["stages"][0].update(repeat=10**6), "out of range"),
    "too many stages in all": (
        lambda v: v.update(stages=[{**v["stages"][0], "repeat": 4096}] * 2),
        "too many",
    ),
    "microbatches": (lambda v: v.update(microbatches=10**9), "out of range"),
    "unknown objective": (lambda v: v.update(objective="speed"), "unknown objective 'speed'"),
    "placement": (lambda v: v.update(placement="v:3"), "does not fit 2 stages"),
    "placement of code": (lambda v: v.update(placement="v:__import__"), "does not fit"),
    "sum of times": (
        lambda v: (v["stages"][0].update(forward_ns=2**53 - 1), v.update(microbatches=64)),
        "times are too large to add up",
    ),
    "sum of travel times": (lambda v: v.update(link={"latency_ns": 2**53 - 1}), "times are too large"),
    "slow link": (
        lambda v: v.update(
            links=[{"source_rank": 0, "target_rank": 1, "bytes_per_second": 1}],
            edges=[{"source": 0, "target": 1, "forward_bytes": 2**53 - 1}],
        ),
        "times are too large",
    ),
    "sum of host time": (lambda v: v.update(overhead_ns=2**53 - 1), "times are too large"),
    "sum of a variant": (
        lambda v: v["stages"][0].update(variants=[{**WAY, "full_backward_ns": 2**53 - 1}]),
        "times are too large",
    ),
    "sum of bytes": (
        lambda v: (v["stages"][0].update(saved_bytes=2**53 - 1), v.update(microbatches=1 << 10)),
        "bytes are too large to add up",
    ),
    "step of too many actions": (lambda v: v.update(microbatches=1 << 20), "stages times microbatches"),
}


@pytest.mark.parametrize("case", WRONG_PROFILES)
def test_wrong_profiles_are_refused_with_the_reason(case: str) -> None:
    edit, reason = WRONG_PROFILES[case]
    with pytest.raises(FormatError, match=reason):
        profile_json.loads(change("profile", edit))


def test_counts_are_bounded_before_anything_is_allocated() -> None:
    """A million microbatches on two thousand stages fit in a file of 20 kB; nothing may be built by them."""
    hostile = {
        "format": "zbcompile.schedule",
        "version": 1,
        "placement": [0] * 2000,
        "microbatches": 1 << 20,
        "order": [[["forward", 0, 0]]],
    }
    texts = [json.dumps(hostile), "0F1048575,4095F0\n", "4095F0\n" * 3]
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="shorter than"):
            schedule_json.loads(texts[0])
        for text in texts[1:]:
            with pytest.raises(FormatError):
                torch_csv.loads(text)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_lines_are_bounded_before_they_are_kept() -> None:
    """64 MiB of empty lines would be four gigabytes of empty ranks."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="too many lines"):
            torch_csv.loads("0F0\n" + "\n" * 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


@given(st.lists(st.integers(0, 2**53 - 1), min_size=9, max_size=9), st.integers(1, 8))
def test_what_a_profile_may_say_can_be_written_and_read_again(numbers: list[int], count: int) -> None:
    """The longest order of a profile that is taken, one action after the other, fits into a file."""
    latency, rate, overhead, *times = numbers
    stages = tuple(StageCost(*times[:4], *times[4:6]) for _ in range(2))
    size = times[0] % 10**6
    profile = Profile(stages, (Edge(0, 1, size, size),), Link(latency, rate), overhead_ns=overhead)
    try:
        problem_json.check_amount(profile, count, "profile")
    except FormatError:
        return
    problem = Problem.of(profile, num_microbatches=count)
    rows: list[list[Action]] = [[], []]
    for i in range(count):
        rows[0] += [Action(Kind.FORWARD, 0, i), Action(Kind.BACKWARD_INPUT, 0, i)]
        rows[1] += [Action(Kind.FORWARD, 1, i), Action(Kind.BACKWARD_INPUT, 1, i)]
        for stage in (0, 1):
            rows[stage].append(Action(Kind.BACKWARD_WEIGHT, stage, i))
    schedule = Schedule.of(problem.placement, count, rows)
    value = simulate(schedule, problem).value_ns
    solution = Solution(problem, schedule, Certificate("span", value, value, "work"))
    assert schedule_json.loads(schedule_json.dumps(solution)).solution() == solution


WRONG_TEXT = {
    "placement 0\nmicrobatches 1\nrank 0: 5F0 0BW0\n": "5F0 names a stage or microbatch that is not there",
    "placement 0\nmicrobatches 1\nrank 0: 0F1 0BW0\n": "0F1 names a stage or microbatch",
    "placement 0 1\nmicrobatches 1\nrank 0: 0F0 0SF0>7\nrank 1: 1F0\n": "0SF0>7 names a stage",
    "placement 0 1\nmicrobatches 1\nrank 0: 0F0 0BW0\n": "one row of actions per rank",
    "placement 0\nmicrobatches 1\nrank 0: 0F0\nrank 1: 0BW0\n": "one row of actions per rank",
    "placement 0 2\nmicrobatches 1\nrank 0: 0F0\nrank 1: 1F0\n": "without a hole",
    "placement -1\nmicrobatches 1\nrank 0: 0F0\n": "'-1' is not a number",
    "placement \u0660\nmicrobatches 1\nrank 0: 0F0\n": "is not a number",
    "placement 0\nmicrobatches 0\nrank 0:\n": "number of microbatches",
    "placement 0\nmicrobatches 9999999\nrank 0: 0F0\n": "number of microbatches",
    "placement 0\nmicrobatches 1_0\nrank 0: 0F0\n": "'1_0' is not a number",
    "placement 0\nmicrobatches " + "9" * 5000 + "\nrank 0: 0F0\n": "is not a number",
    "placement 0\nmicrobatches 1 1\nrank 0: 0F0\n": "broken schedule text",
    "placement 0\nmicrobatches 1\nrank \u0660: 0F0\n": "expected 'rank 0:'",
    "placement 0\nmicrobatches 1\nrank 0: \u0660F0\n": "is not an action",
    "placement 0\nmicrobatches 1\n\x1b[2J\x07: 0F0\n": "expected 'rank 0:'",
    "placement 0\nmicrobatches 1\nrank 0: \x1b[2J\n": "is not an action",
    "placement \x1b[2J\nmicrobatches 1\nrank 0: 0F0\n": "is not a number",
    "placement 0\n\x9b31m 1\nrank 0: 0F0\n": "expected 'microbatches'",
    "placement " + "0 " * 5000 + "\nmicrobatches 1\nrank 0: 0F0\n": "too many stages",
}


@pytest.mark.parametrize("text", WRONG_TEXT, ids=range(len(WRONG_TEXT)))
def test_wrong_text_is_refused_with_its_file(text: str) -> None:
    with pytest.raises(FormatError, match=WRONG_TEXT[text]) as caught:
        load_schedule(text, "order.txt")
    assert "order.txt" in str(caught.value)
    assert all(line.isprintable() for line in str(caught.value).splitlines())


WRONG_CSV = {
    "": "no action",
    "\n\n": "no action",
    "0F0,hello\n": "'hello' is not an action",
    "0X0\n": "is not an action",
    "-1F0\n": "is not an action",
    "0F0x\n": "is not an action",
    "\u0661F0\n": "is not an action",
    "0F99999999999999999999\n": "is not an action",
    "0F0,0B0\n0F1\n": "stands on rank 0 and on rank 1",
    "0F0\n2F0\n": "stage 1 has no action",
    "0F0\n\n1F0\n": "without a hole",
    "0RECV_F0,0F0\n": "speaks to stage -1",
    "0F0,0SEND_F0\n": "0SF0>1 names a stage or microbatch that is not there",
    "(\x1b[2J)OVERLAP_F_B\n": "joins two actions",
    "0F0\x07\n": "is not an action",
    "(0F0)OVERLAP_F_B\n": "joins two actions",
    "(0F0;0I0;0W0)OVERLAP_F_B\n": "joins two actions",
    "((0F0;0I0)OVERLAP_F_B;0W0)OVERLAP_F_B\n": "is not an action",
    '"0F0\n': "not CSV",
    "0F0\x1b[2J\n": "is not an action",
}


@pytest.mark.parametrize("text", WRONG_CSV, ids=range(len(WRONG_CSV)))
def test_wrong_csv_is_refused_with_the_cell(text: str) -> None:
    with pytest.raises(FormatError, match=WRONG_CSV[text]) as caught:
        torch_csv.loads(text)
    assert "\x1b" not in str(caught.value)


@given(st.text(alphabet="0123FIBWSEND_RCV,;()\n\"'- \r\x00", max_size=60))
def test_any_text_is_a_csv_or_a_format_error(text: str) -> None:
    refusal(torch_csv.loads, text)
