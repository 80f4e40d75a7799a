"""What a rank does once a step in the picture, in words, in files and traces."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from zbcompile.compiler.lower import lower
from zbcompile.compiler.rehearsal import rehearse
from zbcompile.formats import chrome_trace, profile_json, schedule_json
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.planner.core.instance import Instance, to_schedule
from zbcompile.planner.imported import rated
from zbcompile.planner.starts.initial import one_at_a_time
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Kind, Placement, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.show.explain import explained
from zbcompile.show.explain_json import explanation_json
from zbcompile.show.explain_words import explanation_text
from zbcompile.show.once_lane import once_times
from zbcompile.show.summary import summarize
from zbcompile.show.timeline import Picture

STAGE = StageCost.simple(10_000_000, 10_000_000, 8_000_000, 2, 1)
ONCE = replace(STAGE, unshard_ns=4_000_000, reduce_ns=40_000_000, update_ns=5_000_000)


def file_of(stage: StageCost) -> ScheduleFile:
    problem = Problem.of(Profile.uniform(stage, 4, 1_000_000), Placement.v(2), 4, 8)
    order = to_schedule(one_at_a_time(Instance.of(problem), fusing=True), problem)
    return ScheduleFile.of(lower(rated(order, problem), merge=True).solution)


def text_of(renderable: object, width: int = 80) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=width, no_color=True).print(renderable)
    return buffer.getvalue()


def test_the_picture_has_a_lane_for_them_in_80_columns() -> None:
    text = text_of(Picture(summarize(file_of(ONCE))))
    lanes = [line for line in text.splitlines() if line.startswith("  once")]
    assert len(lanes) == 2
    assert all("R" in lane and lane.rstrip().split("R")[-1].count("U") == 1 for lane in lanes)
    assert "reduction of gradients (REDUCE_GRAD), once a step" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "once" not in text_of(Picture(summarize(file_of(STAGE))))


def test_explain_names_the_ranks_that_end_with_a_reduction() -> None:
    file = file_of(ONCE)
    found = explained(file)
    text = " ".join(text_of(explanation_text(found)).split())
    assert "ranks 0 and 1 end with the reduction of a stage's gradients" in text
    assert "waiting for its reductions + 10 ms of update" in text
    assert "every order pays" in text
    assert "does not hold" not in text
    timeline = found.timeline
    rows = explanation_json(found)["per_rank"]
    assert isinstance(rows, list)
    assert [row["exposed_reduction_ns"] for row in rows] == [timeline.exposed_ns(rank) for rank in range(2)]
    for facts in found.ranks:
        parts = (facts.work_ns, facts.held_ns, facts.exposed_ns, facts.update_ns, facts.idle_ns)
        assert sum(parts) == facts.span_ns


@pytest.mark.timeout(120)
def test_a_rehearsal_sleeps_for_them_too() -> None:
    """On two processes: gathers, reductions and updates last as planned, and make the step longer."""
    found = rehearse(file_of(ONCE).solution(), steps=1)
    assert found is not None
    for rank in range(2):
        rows = {row.kind: row for row in found.rows if row.rank == rank}
        for kind, planned in ((Kind.UNSHARD, 8_000_000), (Kind.REDUCE_GRAD, 80_000_000), (None, 10_000_000)):
            assert rows[kind].planned_ns == planned
            assert rows[kind].measured_ns > 0.5 * planned
        assert rows[Kind.UNSHARD].count == rows[Kind.REDUCE_GRAD].count == 2
    compute_ends = max(end for row in found.measured.ranks for a, _, end in row if a.kind.is_compute)
    assert found.measured_ns > compute_ends + 40_000_000
    without = replace(ONCE, unshard_ns=0, reduce_ns=0, update_ns=0)
    assert found.planned_ns > simulate(*_order_and_problem(without)).makespan_ns


def _order_and_problem(stage: StageCost) -> tuple[Schedule, Problem]:
    file = file_of(stage)
    assert file.problem is not None
    return file.schedule, file.problem


def test_times_of_the_lane_are_the_simulators() -> None:
    file = file_of(ONCE)
    assert file.problem is not None
    timeline = simulate(file.schedule, file.problem)
    for rank in range(2):
        times = once_times(timeline, rank)
        assert [once.letter for once in times] == ["G", "G", "R", "R", "U"]
        assert times[-1].end_ns == timeline.rank_end[rank]
        assert all(one.end_ns <= other.start_ns for one, other in zip(times, times[1:], strict=False))


def test_files_and_traces_carry_them_and_others_stay_as_they_were() -> None:
    file, plain = file_of(ONCE), file_of(STAGE)
    assert schedule_json.loads(schedule_json.dumps(file)) == file
    assert file.problem is not None
    assert plain.problem is not None
    assert profile_json.loads(profile_json.dumps(file.problem.profile)).profile == file.problem.profile
    assert all(word not in schedule_json.dumps(plain) for word in ("unshard", "reduce", "update_ns"))
    events = json.loads(chrome_trace.dumps(simulate(file.schedule, file.problem)))["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names.count("update") == 2
    assert names.count("3REDUCE_GRAD") == 1
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "whole stages" in lanes
    assert "whole stages" not in chrome_trace.dumps(simulate(plain.schedule, plain.problem))
