"""Orders with several stages per rank on a problem's ranks, and what the first line of ``plan`` says."""

from __future__ import annotations

import pytest

from zbcompile.errors import CheckError
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.planner.core.instance import to_schedule
from zbcompile.planner.plan import plan
from zbcompile.planner.rivals import INTERLEAVED, ZB_V, rivals
from zbcompile.planner.starts.classic import orders_for
from zbcompile.planner.starts.classic_loops import interleaved, zb_v
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import TRANSPORTS, Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.show.gain import gain_line
from zbcompile.show.summary import summarize

STAGE = StageCost.simple(36, 38, 18, 100, 36)


def problem(p: int, m: int, cap: int | None, transport: str = "async") -> Problem:
    caps = cap if cap is None else cap * 100
    return Problem.of(Profile.uniform(STAGE, p, 2), Placement.linear(p), m, caps, "span", transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("p", "m", "cap"), [(2, 4, 2), (4, 8, 5), (4, 12, None)])
def test_rivals_are_timed_as_the_simulator_does(transport: str, p: int, m: int, cap: int | None) -> None:
    for rival in rivals(problem(p, m, cap, transport)):
        assert rival.halves
        assert rival.problem.profile.stages[0].forward_ns == 18
        if rival.value_ns is None:
            assert transport == "batched"
            assert "deadlocks" in rival.why
            codes = interleaved(p, 2, m, zero_bubble=False) if rival.name == INTERLEAVED else zb_v(p, m)
            orders = dict(orders_for(rival.problem))
            assert orders[rival.name] == codes
            continue
        schedule = rival.schedule()
        assert schedule is not None
        timeline = simulate(schedule, rival.problem)
        assert timeline.value_ns == rival.value_ns
        caps = rival.problem.caps
        assert rival.fits == all(c is None or b <= c for b, c in zip(timeline.peak_bytes, caps, strict=True))


def test_an_order_that_is_said_to_deadlock_does() -> None:
    for rival, codes in zip(
        rivals(problem(4, 8, None, "batched")),
        (interleaved(4, 2, 8, zero_bubble=False), zb_v(4, 8)),
        strict=True,
    ):
        assert codes is not None
        with pytest.raises(CheckError, match="deadlock"):
            simulate(to_schedule(codes, rival.problem), rival.problem)


def test_several_stages_per_rank_run_as_they_are() -> None:
    given = Problem.of(Profile.uniform(STAGE, 6, 2), Placement.looped(2, 3), 4)
    looped, in_v = rivals(given)
    assert (looped.halves, looped.problem) == (False, given)
    assert in_v.why == "it takes two stages per rank"
    uneven = Problem.of(Profile.uniform(STAGE, 3, 2), Placement((0, 0, 1)), 4)
    assert {rival.why for rival in rivals(uneven)} == {"its stages do not divide evenly among the ranks"}
    assert rivals(problem(4, 9, None))[0].why == "m is no multiple of the rounds"


def test_microbatches_that_differ_are_timed_as_they_are() -> None:
    costs = tuple(MicrobatchCost.of(str(factor)) for factor in (1, 2, 0.5, 1))
    given = problem(2, 4, None).with_(microbatch_costs=costs)
    for rival in rivals(given):
        schedule = rival.schedule()
        assert schedule is not None
        assert rival.value_ns == simulate(schedule, rival.problem).value_ns


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (problem(4, 8, 4), ("is worth it here: span", "1F1B does not fit", "try two stages per rank")),
        (
            problem(4, 8, 2),
            ("at the same memory, 1F1B cut down to 2 in flight so that it fits", "ZB-V does not fit"),
        ),
        (problem(4, 8, None), ("with no cap on memory", "longer than ZB-V (828 ns, stages in halves)")),
        (problem(1, 4, None), ("does not pay here", "as long as 1F1B", "one rank has no bubble")),
        (problem(4, 8, 8, "batched"), ("interleaved 1F1B does not apply: it deadlocks with batched sends",)),
        (
            Problem.of(Profile.uniform(STAGE, 3, 2), Placement((0, 0, 1)), 4),
            ("1F1B does not apply: its stages do not divide", "ZB-V does not apply"),
        ),
    ],
)
def test_the_first_line_says_whether_it_is_worth_it(given: Problem, words: tuple[str, ...]) -> None:
    solution = plan(given, time_limit_s=2, level=1)
    line = gain_line(summarize(ScheduleFile.of(solution)), rivals(given))
    for part in words:
        assert part in line, line
    assert "\n" not in line


def test_a_published_order_with_zero_bubble_counts_where_the_plan_is_longer() -> None:
    given = problem(4, 16, 100)
    line = gain_line(summarize(ScheduleFile.of(plan(given, time_limit_s=2, fuse="always"))), rivals(given))
    assert line.startswith("zero bubble is worth it here")
    assert line.endswith("try two stages per rank")
    assert f"longer than {INTERLEAVED}" in line
    assert ZB_V in line
