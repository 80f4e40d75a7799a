"""A picture at a glance: it fits its screen, folds what repeats, and explains every sign that it draws."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from tests.show.test_show import drawn, example, measured_like
from tests.support.strategies import greedy_order, problems
from zbcompile.errors import CheckError
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.planner.core.instance import to_schedule
from zbcompile.planner.starts.classic import one_f_one_b, zb_h1
from zbcompile.planner.starts.classic_loops import interleaved
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.steady import steady_state
from zbcompile.schedule.waits import Waits
from zbcompile.show.boxes import held_times
from zbcompile.show.choice import chosen_ranks
from zbcompile.show.palette import ASCII, KIND_COLOURS, UNICODE, Glyphs
from zbcompile.show.scale import Scale
from zbcompile.show.summary import summarize
from zbcompile.show.timeline import View

MS = 1_000_000
STAGE = replace(StageCost.simple(18 * MS, 19 * MS, 10 * MS, 1 << 27, 1 << 26), static_bytes=1 << 30)


def classic(p: int, m: int, transport: str = "async", order=zb_h1, lag: int = 600_000) -> ScheduleFile:
    cap = (1 << 30) + p * (1 << 27)
    problem = Problem.of(Profile.uniform(STAGE, p, lag), num_microbatches=m, cap=cap, transport=transport)
    return ScheduleFile(to_schedule(order(p, m), problem), problem)


def test_long_steps_are_folded_and_stay_as_they_are(golden) -> None:
    golden("show_folded_80.txt", drawn(classic(8, 64), 80, view=View(lines=23)))
    golden("show_folded_120.txt", drawn(classic(8, 64), 120))
    golden("show_folded_200.txt", drawn(classic(8, 64), 200, view=View(lines=40)))
    golden("show_many_ranks_80.txt", drawn(classic(64, 96), 80, view=View(lines=23)))
    golden("show_rendezvous_100.txt", drawn(classic(4, 6, "rendezvous", one_f_one_b, 6 * MS), 100))
    golden("show_followed_100.txt", drawn(example(), 100, view=View(follow=3)))
    golden("show_followed_colour_80.txt", drawn(example(), 80, colour=True, view=View(follow=3)))


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_a_picture_fits_its_screen_with_headline_and_legend(ranks: int, width: int) -> None:
    for lines, colour in ((23, False), (40, True)):
        text = drawn(classic(ranks, min(64, 2 * ranks)), width, colour=colour, view=View(lines=lines))
        rows = [Text.from_ansi(line).plain for line in text.splitlines()]
        assert len(rows) <= lines
        assert max(map(len, rows)) <= width
        assert "1F1B" in rows[0]
        assert "gradient of weights" in "\n".join(rows[-7:])
        left_out = re.search(r"(\d+) of \d+ ranks left out", "\n".join(rows))
        shown = [row for row in rows if row.startswith("rank ")]
        assert len(shown) + (int(left_out[1]) if left_out else 0) == ranks
        assert shown[0].startswith("rank 0 ")
        assert shown[-1].startswith(f"rank {ranks - 1} ")


def test_where_no_screen_bounds_it_a_long_picture_says_its_headline_again_at_the_end() -> None:
    rows = drawn(classic(64, 64), 80).splitlines()
    assert len([row for row in rows if row.startswith("rank ")]) == 64
    assert rows[-1] == rows[0]
    assert drawn(classic(4, 4), 80).splitlines()[-1] != drawn(classic(4, 4), 80).splitlines()[0]


def test_one_period_stands_for_all_and_its_count_is_told() -> None:
    file = classic(8, 64)
    steady = steady_state(simulate(file.schedule, file.problem))
    text = drawn(file, 80)
    assert f"x{steady.repeats} steady" in text
    assert f"one of {steady.repeats} periods of 47 ms" in text
    for view in (View(fold=False), View(window=(0, 900 * MS))):
        assert "steady: one of" not in drawn(file, 80, view=view)
        assert f"x{steady.repeats}" not in drawn(file, 80, view=view)
    assert "x" not in next(line for line in drawn(classic(4, 8), 120).splitlines() if "warm-up" in line)
    assert "x" in next(
        line for line in drawn(classic(4, 20), 400, view=View(fold=True)).splitlines() if "warm-up" in line
    )


def test_a_step_that_is_all_steady_state_leaves_room_for_the_other_parts() -> None:
    """One microbatch at a time has no warm-up: the period takes the whole step."""
    rows = [
        [Action(kind, s, i) for i in range(40) for kind in (Kind.FORWARD, Kind.FULL_BACKWARD)] for s in (0, 1)
    ]
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 4, 5), 2, 1), None, 40)
    file = ScheduleFile(Schedule.of(problem.placement, 40, rows), problem)
    timeline = simulate(file.schedule, problem)
    assert steady_state(timeline) is not None
    for columns in range(26, 200):
        windows = Scale.of(timeline, timeline.makespan_ns, columns, None, True).windows
        assert sum(window.columns for window in windows) == columns - 2
        assert min(window.columns for window in windows) >= 8
    assert "steady" in drawn(file, width=80)


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_every_sign_of_a_lane_is_in_the_legend(colour: bool, glyphs: Glyphs) -> None:
    """Nothing is drawn between the axis and the legend that the legend does not show."""
    files = [
        example(),
        classic(8, 64),
        classic(4, 6, "rendezvous", one_f_one_b, 6 * MS),
        classic(16, 40),
        replace(example(), problem=example().problem.with_(caps=(1 << 30,) * 4)),
    ]
    for file, follow in itertools.product(files, (None, 1)):
        text = drawn(file, 90, colour=colour, ascii_only=glyphs is ASCII, view=View(follow=follow))
        lanes, legend = split_at_legend(text)
        signs = {c for lane in lanes for c in lane} - set(" 0123456789")
        known = set(legend) | set(glyphs.levels) | {glyphs.wall, glyphs.both}
        known |= set("▏▎▍▌▋▊▉█▁") if colour else set()  # parts of a cell; the line of the critical path
        assert signs <= known, (file, signs - known)


def split_at_legend(text: str) -> tuple[list[str], str]:
    """Return what is drawn between names and notes of the lanes, and the legend."""
    rows = [Text.from_ansi(line).plain for line in text.splitlines()]
    axis = max(k for k, row in enumerate(rows) if row.lstrip().startswith(("╷0", "|0")))
    end = next(k for k, row in enumerate(rows) if row.startswith("path"))
    left = len("rank 10 " if "rank 10" in text else "rank 0 ")
    right = rows[axis].rindex("idle") - 2
    lanes = [row[left:right] for row in rows[axis + 1 : end + 1]]
    return lanes, "\n".join(rows[end + 1 :])


def test_a_wall_of_columns_shows_kinds_in_proportion() -> None:
    file = classic(16, 40)
    text = drawn(file, 60, view=View(fold=False, memory=False, messages=False))
    row = next(line for line in text.splitlines() if line.startswith("rank 15"))
    counts = {letter: row.count(letter) for letter in "FBW"}
    assert "kinds in proportion" in text
    assert all(counts.values())
    assert abs(counts["F"] / counts["B"] - 18 / 19) < 0.15
    assert abs(counts["W"] / counts["B"] - 10 / 19) < 0.15


def test_time_that_a_send_holds_its_rank_is_no_bubble() -> None:
    for transport in ("rendezvous", "batched"):
        file = classic(4, 6, transport, one_f_one_b, 6 * MS)
        timeline = simulate(file.schedule, file.problem)
        for rank, row in enumerate(timeline.schedule.order):
            busy = [
                (timeline.start[rank][k], timeline.end[rank][k])
                for k, a in enumerate(row)
                if a.kind.is_compute
            ]
            held = list(held_times(timeline, rank))
            assert held
            for post, start, end in held:
                assert post.kind.is_send or (post.kind.is_recv and transport == "batched")
                assert start < end
                assert all(end <= s or e <= start for s, e in busy)
                at = row.index(post)
                assert timeline.end[rank][at] >= end
        assert "held" in drawn(file, 100)
        assert UNICODE.held in drawn(file, 100)
    free = classic(4, 6, "async", one_f_one_b)
    assert "held" not in drawn(free, 100)
    assert list(held_times(simulate(free.schedule, free.problem), 0)) == []


@settings(max_examples=30)
@given(problems(), st.integers(0, 99), st.sampled_from(["rendezvous", "batched"]))
def test_held_time_is_what_an_explanation_tells(problem: Problem, seed: int, transport: str) -> None:
    """Found here by walking a rank's posts, there along the edges of the event graph."""
    problem = problem.with_(transport=transport)
    try:
        timeline = simulate(greedy_order(problem, Random(seed)), problem)
    except CheckError:  # under batched sends some random orders deadlock
        assume(False)
    waits = Waits(EventGraph(timeline.schedule, problem), timeline)
    for rank in range(problem.num_ranks):
        told = [(p.start_ns, p.start_ns + p.held_ns) for p in waits.pauses(rank) if p.held_ns]
        assert [(start, end) for _, start, end in held_times(timeline, rank)] == told


def test_only_the_microbatch_that_is_followed_keeps_its_letters() -> None:
    lanes, _ = split_at_legend(drawn(example(), 100, view=View(follow=3)))
    labels = {word for lane in lanes for word in re.findall(r"[FBW]\d+", lane)}
    assert labels == {"F3", "B3", "W3"}


def test_ranks_are_drawn_as_asked() -> None:
    rows = drawn(classic(16, 16), 80, view=View(ranks=(0, 3, 15), lines=10)).splitlines()
    assert [row.split()[1] for row in rows if row.startswith("rank ")] == ["0", "3", "15"]
    assert any(row == "13 of 16 ranks left out" for row in rows)
    assert rows[-1] == rows[0]


def test_the_ranks_that_are_kept_are_the_first_the_last_and_the_most_idle() -> None:
    stages = [STAGE] * 32
    stages[13] = replace(
        STAGE, forward_ns=MS, backward_input_ns=MS, backward_weight_ns=0, full_backward_ns=2 * MS
    )
    profile = replace(Profile.uniform(STAGE, 32, 600_000), stages=tuple(stages))
    problem = Problem.of(profile, num_microbatches=32)
    timeline = simulate(to_schedule(one_f_one_b(32, 32), problem), problem)
    for most in (3, 5, 12, 31):
        ranks = chosen_ranks(timeline, most)
        assert len(ranks) == most == len(set(ranks))
        assert {0, 13, 31} <= set(ranks)
    assert chosen_ranks(timeline, 32) == list(range(32))


def test_stages_of_a_rank_differ_with_and_without_colour() -> None:
    placement = Placement.looped(2, 3)
    problem = Problem.of(Profile.uniform(StageCost.simple(30, 31, 20), 6), placement, 4)
    file = ScheduleFile(to_schedule(interleaved(2, 3, 4, zero_bubble=True), problem), problem)
    plain = drawn(file, 120)
    assert re.search("F0", plain)
    assert re.search("f0", plain)
    assert "the rank's later stages" in plain
    coloured = drawn(file, 120, colour=True)
    light = [pair[0] for _, pair in KIND_COLOURS.values()]
    assert "first to last stage" in Text.from_ansi(coloured).plain
    assert ";".join(str(int(light[0][k : k + 2], 16)) for k in (1, 3, 5)) in coloured


def test_planned_and_measured_lie_one_below_the_other() -> None:
    text = drawn(example(), 100, measured=measured_like(example()), view=View(lines=28))
    rows = text.splitlines()
    assert len(rows) <= 28
    assert sum(row.startswith("  real") for row in rows) == 4


def test_a_rank_over_its_cap_is_marked_without_colour() -> None:
    low = replace(example(), problem=example().problem.with_(caps=(1 << 30,) * 4))
    assert f"{UNICODE.over} over the cap" in drawn(low, 100)
    assert UNICODE.over not in drawn(example(), 100)


_SEES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red cones": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no green cones": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no blue cones": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
"""Linear RGB as people see it. Source: Machado, Oliveira, Fernandes, IEEE TVCG 15(6), 2009, severity 1.0."""


def lab(colour: str, sees: str) -> tuple[float, float, float]:
    """Return CIE L*a*b* (D65) of a colour as seen."""
    values = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in _SEES[sees]]
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = [
        sum(a * b for a, b in zip(row, seen, strict=True)) / w for row, w in zip(matrix, white, strict=True)
    ]
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("sees", list(_SEES))
def test_shades_of_two_kinds_can_be_told_apart_with_any_colour_vision(sees: str) -> None:
    """At least 10 apart (CIE76; 2.3 is just noticeable) where they stand on one rank's stage."""
    for (_, one), (_, other) in itertools.combinations(KIND_COLOURS.items(), 2):
        for first, second in zip(one, other, strict=True):
            for a, b in itertools.product(first, second):
                distance = sum((x - y) ** 2 for x, y in zip(lab(a, sees), lab(b, sees), strict=True)) ** 0.5
                assert distance > 10, (a, b, distance)


def test_a_console_of_another_width_draws_the_same_order_again() -> None:
    """The path is found once per picture and serves every width."""
    from zbcompile.show.timeline import Picture

    picture = Picture(summarize(example()))
    for width in (60, 120):
        console = Console(file=io.StringIO(), width=width)
        console.print(picture)
    assert picture.path is picture.path
    assert {picture.summary.timeline.schedule.order[r][k].kind for r, k in picture.path} <= set(Kind)


def test_nothing_of_a_lane_in_colour_is_dimmed_but_idle_time() -> None:
    for file in (example(), classic(8, 64)):
        row = next(line for line in drawn(file, 80, colour=True).splitlines() if line.startswith("rank 1"))
        for span in Text.from_ansi(row.partition("rank 1")[2]).spans:
            if span.style.dim and span.style.bgcolor is not None:
                raise AssertionError(span)
