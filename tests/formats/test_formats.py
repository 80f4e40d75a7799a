"""Files round-trip, keep stable bytes and match the schemas that are shipped with them."""

from __future__ import annotations

import json
from random import Random

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.places import EXAMPLES, GOLDEN
from tests.support.strategies import greedy_order, problems
from zbcompile.errors import FormatError, UsageError
from zbcompile.formats import (
    checkpoint_json,
    chrome_trace,
    measured_json,
    profile_json,
    schedule_json,
    selftest_json,
)
from zbcompile.formats.checkpoint_json import CheckpointFile
from zbcompile.formats.fields import format_json, parse_json
from zbcompile.formats.measured_json import Measured
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.formats.schemas import SCHEMAS, schema_text
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.messages import messages_of
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline, simulate
from zbcompile.schedule.solution import Certificate, Solution

PROFILES = EXAMPLES / "profiles"
VALIDATORS = {name: jsonschema.Draft202012Validator(json.loads(schema_text(name))) for name in SCHEMAS}


def some_costs(draw: st.DrawFn, count: int, stages: int) -> tuple[MicrobatchCost, ...]:
    """Draw costs of microbatches; none in half of the cases."""
    factor = st.integers(0, 3_000_000)
    rows = st.one_of(st.tuples(factor), st.tuples(*[factor] * stages))
    return tuple(MicrobatchCost(draw(rows), draw(rows)) for _ in range(count * draw(st.booleans())))


@st.composite
def solutions(draw: st.DrawFn) -> Solution:
    problem = draw(problems())
    problem = problem.with_(
        caps=tuple(
            draw(
                st.lists(
                    st.one_of(st.none(), st.integers(0, 99)),
                    min_size=problem.num_ranks,
                    max_size=problem.num_ranks,
                )
            )
        ),
        objective=draw(st.sampled_from(["span", "makespan"])),
        transport=draw(st.sampled_from(["async", "rendezvous", "batched"])),
        microbatch_costs=some_costs(draw, problem.num_microbatches, problem.num_stages),
    )
    schedule = greedy_order(problem, Random(draw(st.integers(0, 999))))
    if draw(st.booleans()):
        schedule = insert_communication(schedule, problem)
    value = draw(st.integers(0, 99))
    certificate = Certificate(
        problem.objective,
        value,
        draw(st.integers(0, value)),
        draw(st.sampled_from(["work", "crossing"])),
        {"rank": draw(st.integers(0, 3)), "windows": draw(st.lists(st.integers(0, 9))), "share": 0.25},
    )
    variants = tuple(draw(st.integers(0, 3)) for _ in range(problem.num_stages))
    return Solution(problem, schedule, certificate, variants, draw(st.sampled_from(["", "search", "cp_sat"])))


@st.composite
def profile_files(draw: st.DrawFn) -> ProfileFile:
    problem = draw(problems())
    stages = list(problem.profile.stages)
    if draw(st.booleans()):
        lean = StageCost(1, 2, 3, 4, 1, 1, name="recompute")
        stages[0] = StageCost(3, 3, 2, 5, 4, 2, 1, "embedding ≤ 1", (lean, lean))
    links = (((0, 1), Link(5, 7)),) if problem.num_ranks > 1 and draw(st.booleans()) else ()
    profile = Profile(tuple(stages), problem.profile.edges, problem.profile.link, links, 3, "made by hand")
    return ProfileFile(
        profile,
        draw(st.sampled_from([None, problem.placement])),
        draw(st.sampled_from([None, problem.num_microbatches])),
        draw(st.sampled_from([(), (7,)])),
        draw(st.sampled_from([None, "span", "makespan"])),
        draw(st.sampled_from([None, "batched"])),
        microbatch_costs=some_costs(draw, problem.num_microbatches, problem.num_stages),
    )


@given(solutions())
def test_a_solution_survives_its_file_and_matches_the_schema(solution: Solution) -> None:
    text = schedule_json.dumps(solution)
    assert schedule_json.loads(text).solution() == solution
    assert schedule_json.dumps(schedule_json.loads(text)) == text
    VALIDATORS["schedule"].validate(json.loads(text))


@given(solutions())
def test_a_bare_order_survives_its_file(solution: Solution) -> None:
    text = schedule_json.dumps(solution.schedule)
    back = schedule_json.loads(text)
    assert back == ScheduleFile(solution.schedule)
    VALIDATORS["schedule"].validate(json.loads(text))
    with pytest.raises(FormatError, match="carries no profile"):
        back.solution()


@given(profile_files())
def test_a_profile_survives_its_file_and_matches_the_schema(file: ProfileFile) -> None:
    text = profile_json.dumps(file)
    if file.placement is None and file.profile.links and file.profile.num_stages < 2:
        return
    assert profile_json.loads(text) == file
    VALIDATORS["profile"].validate(json.loads(text))


@given(solutions(), st.integers(-50, 50))
def test_a_measured_timeline_survives_its_file_and_starts_at_zero(solution: Solution, shift: int) -> None:
    rows = [
        [(action, shift + 3 * k, shift + 3 * k + 2) for k, action in enumerate(row)]
        for row in solution.schedule.order
    ]
    measured = Measured.of(rows, "a test")
    text = measured_json.dumps(measured)
    assert measured_json.loads(text) == measured
    assert min(start for row in measured.ranks for _, start, _ in row) == 0
    VALIDATORS["measured"].validate(json.loads(text))


def test_what_stands_beside_tensors_survives_its_file_and_is_json_alone() -> None:
    extra = {"data": {"position": 4096}, "random": [1, 2**40, 0.1], "schedule": None, "pair": (True, "≤")}
    text = checkpoint_json.dumps(CheckpointFile(3, 7, extra))
    back = checkpoint_json.loads(text)
    assert back == CheckpointFile(3, 7, {**extra, "pair": [True, "≤"]})
    assert checkpoint_json.dumps(back) == text
    VALIDATORS["checkpoint"].validate(json.loads(text))
    for value in (float("nan"), {1: "a"}, {"a": {2, 3}}, ["x" * 2000], b"bytes"):
        with pytest.raises(FormatError, match="extra"):
            checkpoint_json.dumps(CheckpointFile(3, 7, value))


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text()),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
        max_leaves=60,
    )
)
def test_the_layout_is_the_json_it_stands_for(value: object) -> None:
    text = format_json(value)
    assert json.loads(text) == value
    assert parse_json(text, "here") == value


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_shipped_schema_is_a_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text(name)))


def test_an_unknown_schema_is_named() -> None:
    with pytest.raises(UsageError, match="'profiles'"):
        schema_text("profiles")


def small_solution() -> Solution:
    stage = StageCost(30, 30, 20, 50, 2000, 1000, 500, "block")
    problem = Problem.of(Profile.uniform(stage, 2, 5, "made by hand"), num_microbatches=2, cap=4500)
    order = Schedule.parse(
        "placement 0 1\nmicrobatches 2\nrank 0: 0F0 0F1 0B0 0W0 0B1 0W1\nrank 1: 1F0 1B0 1F1 1B1 1W0 1W1\n"
    )
    value = simulate(order, problem).span_ns
    witness = {"rank": 0, "windows": [0]}
    certificate = Certificate("span", value, value, "memory_windows", witness)
    return Solution(problem, insert_communication(order, problem), certificate, (0, 0), "by hand")


def test_the_bytes_of_each_format_stay_as_they_are(golden) -> None:
    solution = small_solution()
    golden("schedule.json", schedule_json.dumps(solution))
    file = ProfileFile(solution.problem.profile, None, 2, (4500,), "makespan", "batched")
    golden("profile.json", profile_json.dumps(file))
    timeline = simulate(solution.schedule, solution.problem)
    golden("measured.json", measured_json.dumps(measured_of(timeline)))
    golden("checkpoint.json", checkpoint_json.dumps(CheckpointFile(50, 7, ["epoch", 2, 0.5, None])))
    golden("chrome_trace.json", chrome_trace.dumps(timeline))


def measured_of(timeline: Timeline) -> Measured:
    """A measurement that agrees with the plan."""
    return Measured.of(
        [
            list(zip(row, timeline.start[r], timeline.end[r], strict=True))
            for r, row in enumerate(timeline.schedule.order)
        ]
    )


def test_a_chrome_trace_has_every_action_where_it_happens() -> None:
    solution = small_solution()
    timeline = simulate(solution.schedule, solution.problem)
    events = json.loads(chrome_trace.dumps(timeline))["traceEvents"]
    spans = {(e["pid"], e["name"]): (e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X"}
    assert len(spans) == sum(len(row) for row in solution.schedule.order)
    for rank, k, action in solution.schedule.actions():
        start, duration, lane = spans[rank, str(action)]
        assert (start, duration) == (
            timeline.start[rank][k] / 1000,
            (timeline.end[rank][k] - timeline.start[rank][k]) / 1000,
        )
        assert (lane == 0) == action.kind.is_compute
    held = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(held) == timeline.peak_bytes[0]
    measured = json.loads(chrome_trace.dumps_measured(measured_of(timeline)))["traceEvents"]
    assert [e for e in measured if e["ph"] == "X"] == [e for e in events if e["ph"] == "X"]


@pytest.mark.parametrize("communication", [True, False])
def test_a_chrome_trace_has_an_arrow_per_message_from_its_send_to_its_receive(communication: bool) -> None:
    solution = small_solution()
    schedule = solution.schedule if communication else solution.schedule.compute_only()
    timeline = simulate(schedule, solution.problem)
    for text in (chrome_trace.dumps(timeline), chrome_trace.dumps_measured(measured_of(timeline))):
        events = json.loads(text)["traceEvents"]
        ends = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
        if not communication and "bytes held" not in text:
            assert ends == {"s": {}, "f": {}}  # a measured step without messages
            continue
        assert len(ends["s"]) == len(ends["f"]) == len(list(messages_of(solution.problem)))
        for number, sent in ends["s"].items():
            received = ends["f"][number]
            assert (received["bp"], received["pid"]) == ("e", 1 - sent["pid"])
            assert sent["ts"] <= received["ts"]
            microbatches = set()
            for event in (sent, received):
                (span,) = (
                    e
                    for e in events
                    if e["ph"] == "X"
                    and (e["pid"], e["tid"]) == (event["pid"], event["tid"])
                    and e["ts"] <= event["ts"] < e["ts"] + e["dur"]
                )
                microbatches.add(span["args"]["microbatch"])
                assert (event["tid"] == 0) == (not communication)
            assert len(microbatches) == 1


def test_the_example_profiles_are_valid_and_say_where_they_come_from() -> None:
    paths = sorted(PROFILES.glob("*.json"))
    assert paths
    for path in paths:
        file = profile_json.loads(path.read_text(), path.name)
        VALIDATORS["profile"].validate(json.loads(path.read_text()))
        assert file.profile.source
        assert file.num_microbatches


def test_every_example_and_golden_file_is_read_and_matches_its_schema() -> None:
    readers = {
        "zbcompile.schedule": schedule_json.loads,
        "zbcompile.profile": profile_json.loads,
        "zbcompile.measured": measured_json.loads,
        "zbcompile.checkpoint": checkpoint_json.loads,
        "zbcompile.selftest": selftest_json.loads,
    }
    found = set()
    for path in [*EXAMPLES.glob("**/*.json"), *GOLDEN.glob("*.json")]:
        document = json.loads(path.read_text())
        if name := document.get("format"):
            VALIDATORS[name.removeprefix("zbcompile.")].validate(document)
            readers[name](path.read_text(), path.name)
            found.add(name)
    assert found == set(readers)


def test_the_example_profiles_are_the_papers(paper_profiles) -> None:
    for row in paper_profiles["configs"]:
        name = f"gpt-{row['model'].lower()}-p{row['num_ranks']}-m{row['num_microbatches']}.json"
        file = profile_json.loads((PROFILES / name).read_text(), name)
        assert file.num_microbatches == row["num_microbatches"]
        assert file.profile.num_stages == row["num_ranks"]
        assert file.profile.link == Link(1000 * row["comm_us"])
        stage = file.profile.stages[0]
        assert stage.forward_ns == 1000 * row["forward_us"]
        assert stage.backward_input_ns == 1000 * row["backward_input_us"]
        assert stage.backward_weight_ns == 1000 * row["backward_weight_us"]
        assert stage.saved_bytes * row["saved_for_weight_units"] == (
            stage.saved_for_weight_bytes * row["saved_units"]
        )


def test_the_least_a_profile_may_say() -> None:
    stage = {
        "forward_ns": 3,
        "backward_input_ns": 3,
        "backward_weight_ns": 2,
        "saved_bytes": 2,
        "saved_for_weight_bytes": 1,
    }
    document = {
        "format": profile_json.FILE.name,
        "version": profile_json.FILE.version,
        "stages": [{"repeat": 4, **stage}],
    }
    VALIDATORS["profile"].validate(document)
    file = profile_json.loads(json.dumps(document))
    assert file == ProfileFile(Profile.uniform(StageCost.simple(3, 3, 2), 4))
    assert file.problem() == Problem.of(file.profile, num_microbatches=8)
    document["placement"] = "v:2"
    assert profile_json.loads(json.dumps(document)).placement == Placement.v(2, 2)
    document["placement"], document["caps_bytes"] = "looped", [5, None]
    file = profile_json.loads(json.dumps(document))
    assert file.problem().caps == (5, None)
    assert file.problem(caps=[7]).caps == (7, 7)
    assert file.problem(placement=Placement.linear(4), caps=[7]).caps == (7,) * 4


def test_a_file_carries_the_variants_that_were_offered() -> None:
    """The profile as it was offered, and which variant runs; an old file has the chosen ones alone."""
    lean = StageCost(3, 4, 2, 6, 1, 1, name="recompute")
    stages = (StageCost(3, 3, 2, 5, 4, 2, 7, "a", (lean, lean)), StageCost(3, 3, 2, 5, 4, 2, 7, "b"))
    offered = Profile(stages, link=Link(1))
    problem = Problem.of(offered.choose((2, 0)), num_microbatches=2)
    schedule = greedy_order(problem, Random(1))
    value = simulate(schedule, problem).value_ns
    certificate = Certificate("span", value, 0, "variants")
    solution = Solution(problem, schedule, certificate, (2, 0), "search", offered)
    text = schedule_json.dumps(solution)
    assert json.loads(text)["profile"].items() <= json.loads(profile_json.dumps(offered)).items()
    assert schedule_json.loads(text).solution() == solution
    assert schedule_json.dumps(schedule_json.loads(text)) == text
    VALIDATORS["schedule"].validate(json.loads(text))
    old = Solution(problem, schedule, certificate, (2, 0), "search")
    assert schedule_json.loads(schedule_json.dumps(old)).solution() == old
    document = json.loads(text)
    del document["variants"]
    assert schedule_json.loads(json.dumps(document)).problem == problem.with_(profile=offered.choose((0, 0)))
    document["variants"] = [3, 0]
    with pytest.raises(FormatError, match="stage 0 has no variant 3"):
        schedule_json.loads(json.dumps(document))
    with pytest.raises(UsageError, match="not what its variants choose"):
        schedule_json.dumps(Solution(problem, schedule, certificate, (0, 0), "search", offered))


def test_text_for_people_is_written_as_it_can_be_read() -> None:
    """Modules may have any name: two lines, control characters, a thousand characters."""
    stage = StageCost(1, 1, 1, 2, 1, 1, name="layer\n\x1b[2J" + "x" * 2000)
    text = profile_json.dumps(Profile((stage,), source="one\ntwo"))
    back = profile_json.loads(text).profile
    assert back.source == "one two"
    assert back.stages[0].name.startswith("layer \\x1b[2Jxxx")
    assert len(back.stages[0].name) == 1000


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ([{"time_ppm": [1_000_000]}], "one cost per microbatch"),
        ([{"time_ppm": []}] * 2, "microbatch_costs"),
        ([{"time_ppm": [1.5]}] * 2, "time_ppm"),
        ([{"time_ppm": [1, 1, 1]}] * 2, "one for all stages or one per stage"),
        ([{"time_ppm": [10**10]}] * 2, "time_ppm"),
        ([{"seconds": 1}] * 2, "seconds"),
    ],
)
def test_costs_of_microbatches_that_cannot_be_meant_are_refused(costs: object, words: str) -> None:
    solution = small_solution()
    for text, read in (
        (schedule_json.dumps(solution), schedule_json.loads),
        (profile_json.dumps(ProfileFile(solution.problem.profile, None, 2)), profile_json.loads),
    ):
        with pytest.raises(FormatError, match=words):
            read(json.dumps(json.loads(text) | {"microbatch_costs": costs}))


def test_costs_of_microbatches_that_do_not_add_up_are_refused() -> None:
    large = Profile.uniform(StageCost.simple(1 << 45, 0, 0), 1)
    text = profile_json.dumps(ProfileFile(large, None, 1))
    assert profile_json.loads(text).num_microbatches == 1
    with pytest.raises(FormatError, match="too large to add up"):
        profile_json.loads(json.dumps(json.loads(text) | {"microbatch_costs": [{"time_ppm": [10**9]}]}))
