"""What people see: golden pictures, exact scale, and figures that agree with the simulation."""

from __future__ import annotations

import gc
import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.default_styles import DEFAULT_STYLES
from rich.style import Style

from tests.support.strategies import greedy_order, problems
from zbcompile.formats.measured_json import Measured
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.planner.core.instance import to_schedule
from zbcompile.planner.starts.classic import one_f_one_b as classic_1f1b
from zbcompile.planner.starts.classic import zb_h1
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Certificate
from zbcompile.show.baseline import one_f_one_b
from zbcompile.show.export import export, fragment
from zbcompile.show.lanes import Box, bar_lane, memory_lane
from zbcompile.show.palette import ASCII, UNICODE
from zbcompile.show.scale import Window
from zbcompile.show.summary import Proof, headline, proof_line, remarks, summarize, to_json
from zbcompile.show.timeline import Picture, View
from zbcompile.show.units import format_bytes, ticks, time_unit

MS = 1_000_000


def example(cap_microbatches: int | None = 4) -> ScheduleFile:
    """ZB-H1 on four ranks with sends, proved by nobody."""
    stage = replace(StageCost.simple(30 * MS, 31 * MS, 20 * MS, 1 << 29, 1 << 28), static_bytes=300 << 20)
    cap = None if cap_microbatches is None else (300 << 20) + cap_microbatches * (1 << 29)
    problem = Problem.of(Profile.uniform(stage, 4, 600_000), num_microbatches=8, cap=cap)
    schedule = insert_communication(to_schedule(zb_h1(4, 8), problem), problem)
    value = simulate(schedule, problem).span_ns
    return ScheduleFile(
        schedule, problem, Certificate("span", value, value - MS, "memory_windows"), (), "ZB-H1"
    )


def virtual() -> ScheduleFile:
    """Two stages per rank in a V, no profile of its own memory."""
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 4), Placement.v(2, 2), 3)
    return ScheduleFile(greedy_order(problem, Random(7), fuse=0.4), problem)


def drawn(
    file: ScheduleFile,
    width: int,
    *,
    colour: bool = False,
    measured: Measured | None = None,
    view: View | None = None,
    ascii_only: bool = False,
) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii_only else "utf-8")
    for style in (*DEFAULT_STYLES.values(), *(thing for thing in gc.get_objects() if type(thing) is Style)):
        style._ansi = None  # rich keeps the codes of the first console that a style was drawn on
    console = Console(
        file=stream,
        width=width,
        force_terminal=colour,
        highlight=False,
        legacy_windows=False,
        color_system="truecolor" if colour else None,
    )
    console.print(Picture(summarize(file), view or View(), measured))
    stream.seek(0)
    return stream.read()


def measured_like(file: ScheduleFile) -> Measured:
    """The plan with every action 10 % slower."""
    timeline = simulate(file.schedule, file.problem)
    rows = [
        [
            (a, s * 11 // 10, e * 11 // 10)
            for a, s, e in zip(row, timeline.start[r], timeline.end[r], strict=True)
        ]
        for r, row in enumerate(file.schedule.order)
    ]
    return Measured.of(rows, "a test")


def test_pictures_stay_as_they_are(golden) -> None:
    golden("show_plain_100.txt", drawn(example(), 100))
    golden("show_plain_56.txt", drawn(example(), 56))
    golden("show_colour_80.txt", drawn(example(), 80, colour=True))
    golden("show_ascii_80.txt", drawn(example(), 80, ascii_only=True))
    golden("show_virtual_90.txt", drawn(virtual(), 90))
    golden("show_measured_100.txt", drawn(example(), 100, measured=measured_like(example())))
    golden("show_window_100.txt", drawn(example(), 100, view=View((200 * MS, 400 * MS), False, False)))
    golden("show_no_profile_80.txt", drawn(ScheduleFile(example().schedule.compute_only()), 80))


@pytest.mark.parametrize("width", [1, 10, 20, 33, 47, 80, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal_from_twenty_columns_on(width: int, colour: bool) -> None:
    text = drawn(example(), width, colour=colour)
    plain = Console(file=io.StringIO(), width=300)
    if width >= 20:
        from rich.text import Text

        assert all(Text.from_ansi(line).cell_len <= width for line in text.splitlines())
    assert plain.width == 300


def test_ascii_terminals_get_ascii() -> None:
    lanes = [line for line in drawn(example(), 80, ascii_only=True).splitlines() if line.startswith("rank")]
    assert lanes
    assert all(line.isascii() for line in lanes)


@settings(max_examples=25)
@given(problems(), st.integers(0, 99), st.integers(20, 160), st.booleans())
def test_any_order_can_be_drawn(problem: Problem, seed: int, width: int, colour: bool) -> None:
    schedule = greedy_order(problem, Random(seed))
    text = drawn(ScheduleFile(schedule, problem), width, colour=colour)
    assert text.count("rank ") >= problem.num_ranks


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 60))
def test_every_cell_shows_what_fills_most_of_it(parts: list[tuple[int, int]], columns: int) -> None:
    """Gaps and lengths become boxes; each plain cell names the box, or the gap, with the largest share."""
    boxes, at = [], 0
    for k, (gap, length) in enumerate(parts):
        boxes.append(Box(Action(Kind.FORWARD, 0, k), at + gap, at + gap + length))
        at += gap + length
    window = Window(0, at, columns)
    line = bar_lane(boxes, window, UNICODE, colour=False).plain
    assert len(line) == columns
    for column, letter in enumerate(line):
        left, right = window.edge(column), window.edge(column + 1)
        busy = [min(right, b.end_ns * columns) - max(left, b.start_ns * columns) for b in boxes]
        edges = [0, *(t * columns for b in boxes for t in (b.start_ns, b.end_ns))]
        idle = [min(right, b) - max(left, a) for a, b in zip(edges[::2], edges[1::2], strict=False)]
        assert max(idle if letter == UNICODE.gap else busy) >= max(busy + idle)


def test_colour_splits_a_cell_by_eighths() -> None:
    forward, backward = Action(Kind.FORWARD, 0, 100), Action(Kind.BACKWARD_INPUT, 0, 100)
    lane = bar_lane([Box(forward, 0, 3), Box(backward, 3, 16)], Window(0, 16, 2), UNICODE, colour=True)
    assert lane.plain == "▍ "
    lane = bar_lane([Box(forward, 4, 8)], Window(0, 8, 1), UNICODE, colour=True)
    assert lane.plain == "▌"
    assert lane.spans[0].style.reverse


def test_memory_lane_shows_the_highest_level_of_each_cell() -> None:
    steps = [(0, 2), (5, 8), (6, 4), (15, 0)]
    lane = memory_lane(steps, 0, 8, Window(0, 20, 4), UNICODE, colour=False)
    assert lane.plain == "▂█▄▄"
    assert memory_lane(steps, 0, 8, Window(10, 20, 2), ASCII, colour=False).plain == "44"


def test_the_gain_comes_first_and_is_the_simulated_one() -> None:
    file = example()
    summary = summarize(file)
    reference = simulate(to_schedule(classic_1f1b(4, 8), file.problem), file.problem).span_ns
    gain = 1 - summary.timeline.span_ns / reference
    first = drawn(file, 120).splitlines()[0]
    assert first.startswith(f"{100 * gain:.1f} % shorter than 1F1B within the same cap")
    assert to_json(summary)["one_f_one_b"]["gain"] == pytest.approx(gain)
    assert to_json(summary)["one_f_one_b"]["value_ns"] == reference


def test_it_says_when_zero_bubble_does_not_pay() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 2), num_microbatches=4)
    slow = to_schedule([[(0, 0), (1, 0), (2, 0)] * 4, [(0, 1), (1, 1), (2, 1)] * 4], problem)
    assert "zero bubble does not pay here" in headline(summarize(ScheduleFile(slow, problem)))
    same = to_schedule(classic_1f1b(2, 4), problem)
    assert headline(summarize(ScheduleFile(same, problem))).startswith(
        "as long as 1F1B with no cap on memory"
    )


def test_1f1b_runs_with_fewer_in_flight_where_the_cap_is_low() -> None:
    profile = Profile.uniform(StageCost.simple(3, 3, 2), 4)
    problem = Problem.of(profile, num_microbatches=8, cap=4)
    baseline = one_f_one_b(problem)
    assert baseline.in_flight == 2
    assert max(baseline.timeline.peak_bytes) == 4
    assert one_f_one_b(problem.with_(caps=(1,) * 4)).why == "one microbatch does not fit on rank 0"
    free = one_f_one_b(problem.with_(caps=(None,) * 4))
    assert free.timeline.value_ns == simulate(to_schedule(classic_1f1b(4, 8), problem), problem).value_ns
    assert free.timeline.value_ns < baseline.timeline.value_ns


@given(problems())
def test_1f1b_keeps_within_any_cap_it_runs_under(problem: Problem) -> None:
    caps = tuple(problem.static_bytes(r) + 9 + 7 * (r % 2) for r in range(problem.num_ranks))
    baseline = one_f_one_b(problem.with_(caps=caps))
    if baseline.timeline is not None:
        held = zip(baseline.timeline.peak_bytes, baseline.timeline.problem.caps, strict=True)
        assert all(peak <= cap for peak, cap in held)
    else:
        assert baseline.why


def test_1f1b_needs_stages_that_divide_evenly() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(1, 1, 1), 3), Placement((0, 1, 0)))
    assert one_f_one_b(problem).timeline is None


def test_what_is_proved_is_said_and_no_more() -> None:
    file = example()
    value = file.certificate.value_ns
    cases = {
        Proof.GAP: (file.certificate, "gap 0.13 %: no order is shorter than"),
        Proof.OPTIMAL: (
            Certificate("span", value, value, "cp_sat"),
            "proved optimal (cp_sat): no order of this problem is shorter",
        ),
        Proof.ABSENT: (None, "no certificate: nothing is proved about this order"),
        Proof.OTHER_VALUE: (Certificate("span", value - MS, value - MS, "cp_sat"), "the file's certificate"),
    }
    assert set(cases) == set(Proof)
    for proof, (certificate, words) in cases.items():
        summary = summarize(replace(file, certificate=certificate))
        assert summary.proof is proof
        assert proof_line(summary).startswith(words)
        assert ("proves nothing here" in proof_line(summary)) == (proof is Proof.OTHER_VALUE)


def test_orders_that_lack_work_or_exceed_a_cap_are_remarked_on() -> None:
    file = example()
    assert remarks(summarize(file)) == []
    order = [row[:-1] for row in file.schedule.order]
    short = replace(file, schedule=Schedule.of(file.schedule.placement, 8, order))
    assert remarks(summarize(short)) == ["the order has 28 of 32 backward_weight actions"]
    low = replace(file, problem=file.problem.with_(caps=(1 << 30,) * 4))
    assert len(remarks(summarize(low))) == 4
    assert "rank 0 holds 2.29 GiB, over its cap of 1 GiB" in remarks(summarize(low))
    forward = [[a for a in row if a.kind is Kind.FORWARD] for row in file.schedule.compute_only().order]
    drawn(replace(file, schedule=Schedule.of(file.schedule.placement, 8, forward)), 80)


def test_units_read_well() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1 << 20, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1 MiB",
        "1.5 GiB",
        "5 TiB",
    ]
    assert time_unit(5 * MS).text(1_234_567) == "1.235 ms"
    assert time_unit(3_000_000_000).text(1_049_200_000) == "1.049 s"
    assert time_unit(100, abstract=True).text(79) == "79 units"


@given(st.integers(0, 10**13), st.integers(1, 10**13), st.integers(1, 20))
def test_ticks_are_round_inside_and_not_too_many(first: int, length: int, most: int) -> None:
    found = ticks(first, first + length, most)
    assert len(found) <= most
    assert all(first <= t <= first + length for t in found)
    if len(found) > 1:
        step = found[1] - found[0]
        assert str(step).rstrip("0") in ("1", "2", "5")


@pytest.mark.parametrize("drawn_by", [export, fragment])
def test_exports_are_coloured_stable_and_fetch_nothing(drawn_by, monkeypatch: pytest.MonkeyPatch) -> None:
    first = drawn_by(Picture(summarize(example())), 100)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    assert drawn_by(Picture(summarize(example())), 100) == first
    assert "#4a9ede" in first
    assert "shorter" in first
    assert not re.search(r"url\((?!#)|<script|@font-face|href", first)


def test_an_svg_is_well_formed() -> None:
    root = ElementTree.fromstring(export(Picture(summarize(example())), 80))
    assert root.tag.endswith("svg")
    assert "rank" in "".join(root.itertext())
