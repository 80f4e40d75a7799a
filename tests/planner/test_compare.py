"""The comparison with published orders."""

from __future__ import annotations

import pytest

from zbcompile.errors import InfeasibleError
from zbcompile.planner.compare import compare, verdict
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem


def test_linear_rows_and_never_longer_at_equal_memory() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(10, 10, 8, 10, 4), 4, 1), None, 12, 40)
    rows = compare(problem, seconds_per_row=1)
    assert [row.name for row in rows] == ["zbcompile", "ZB-H2", "ZB-H1", "1F1B", "GPipe"]
    assert [row.fits for row in rows] == [True, False, True, True, False]
    for row in rows:
        assert row.bound_ns <= row.ours_ns <= row.value_ns
    assert rows[0].value_ns <= min(row.value_ns for row in rows if row.fits)
    assert "shorter than 1F1B" in verdict(rows)


def test_two_stages_per_rank_compare_v_and_looped() -> None:
    problem = Problem.of(
        Profile.uniform(StageCost.simple(5, 5, 4, 10, 4), 4, 1), Placement.v(2), 8, None, "makespan"
    )
    rows = compare(problem, seconds_per_row=0.5)
    assert {row.name for row in rows} == {
        "zbcompile",
        "ZB-V",
        "V-Half",
        "V-Min",
        "DualPipeV",
        "InterleavedZeroBubble",
        "interleaved 1F1B",
    }
    assert {row.placement for row in rows} == {"v", "looped"}


def test_zero_bubble_that_does_not_pay_is_said_so() -> None:
    """With almost nothing in W there is nothing to fill a bubble with."""
    problem = Problem.of(Profile.uniform(StageCost.simple(1000, 1000, 1, 10, 4), 2), None, 64, 20)
    assert verdict(compare(problem, seconds_per_row=1)).startswith("zero bubble does not pay here")


def test_a_cap_below_one_microbatch_is_an_error() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(1, 1, 1, 10, 4), 2), None, 4, 9)
    with pytest.raises(InfeasibleError, match="rank 0"):
        compare(problem)
