"""Many plans: the front of time and memory, and choices that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbcompile.errors import UsageError
from zbcompile.planner.plan import plan
from zbcompile.planner.sweep import Choice, Swept, best, sweep
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate

PROFILE = Profile.uniform(StageCost.simple(10, 10, 10, 2, 1), 4)


def row(value: int, held: int, count: int = 1) -> Swept:
    return Swept({"cap": "1p"}, count, value, value, held)


def test_every_row_is_a_plan_of_its_own() -> None:
    problems = {cap: Problem.of(PROFILE, None, 8, cap) for cap in (8, 10, 16)}
    choices = [Choice({"cap": str(cap)}, problem) for cap, problem in problems.items()]
    seen: list[int] = []
    rows = list(sweep(choices, seconds_each=5.0, observer=lambda done, _: seen.append(done)))
    assert seen == [1, 2, 3]
    for found, problem in zip(rows, problems.values(), strict=True):
        alone = plan(problem, time_limit_s=5.0)
        assert (found.value_ns, found.bound_ns) == (
            alone.certificate.value_ns,
            alone.certificate.bound_ns,
        )
        assert found.peak_bytes == max(simulate(alone.schedule, problem).peak_bytes)


def test_what_cannot_be_is_a_row_with_its_reason() -> None:
    choices = [
        Choice({"cap": "1"}, Problem.of(PROFILE, None, 8, 1)),
        Choice({"cap": "?"}, None, "not an amount of memory"),
        Choice({"cap": "16"}, Problem.of(PROFILE, None, 8, 16)),
    ]
    small, unknown, good = sweep(choices, seconds_each=5.0)
    assert small.value_ns is None
    assert "bytes on rank 0" in small.refusal
    assert unknown.refusal == "not an amount of memory"
    assert best([small, unknown, good]) == {2}
    with pytest.raises(UsageError, match="positive"):
        list(sweep(choices, seconds_each=0.0))


def test_steps_of_different_lengths_are_compared_per_microbatch() -> None:
    assert best([row(100, 5, 10), row(150, 5, 20)]) == {1}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=12))
def test_the_front_is_what_no_other_row_beats(figures: list[tuple[int, int]]) -> None:
    def beaten(place: int) -> bool:
        time, held = figures[place]
        return any(
            t <= time and h <= held and ((t, h) != (time, held) or other < place)
            for other, (t, h) in enumerate(figures)
            if other != place
        )

    assert best([row(*pair) for pair in figures]) == {k for k in range(len(figures)) if not beaten(k)}
