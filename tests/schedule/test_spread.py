"""Times whose repeats differ widely are named, with figures; steady ones and small ones are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbcompile.errors import UsageError
from zbcompile.formats import profile_json
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.spread import Spread, spread_words, unsteady

STEADY = [1_000_000, 1_010_000, 990_000, 1_020_000, 1_000_000]


def test_a_time_that_jumps_is_named_with_its_figures() -> None:
    jumps = [1_000_000, 30_000_000, 900_000, 40_000_000, 2_000_000]
    (found,) = unsteady({("stage 0", "F"): STEADY, ("stage 1", "B"): jumps})
    assert found == Spread("stage 1", "B", 900_000, 2_000_000, 40_000_000, 5)
    words = spread_words([found])
    assert "B of stage 1 0.9 to 40 ms in 5 repeats (median 2 ms)" in words
    assert "OMP_NUM_THREADS=1" in words
    assert spread_words(()) == ""


def test_one_slow_repeat_of_five_moves_no_median_but_one_of_two_does() -> None:
    once = [*STEADY[:4], 90_000_000]
    assert unsteady({("stage 0", "F"): once}) == ()
    assert unsteady({("stage 0", "F"): once[1:]}) == ()
    assert len(unsteady({("stage 0", "F"): [*once[3:], once[4]]})) == 1
    assert len(unsteady({("stage 0", "F"): once[3:]})) == 1
    assert unsteady({("stage 0", "F"): once[4:]}) == ()
    assert unsteady({}) == ()


def test_what_is_small_beside_the_largest_time_moves_no_order() -> None:
    small = [150_000, 350_000, 150_000, 350_000, 350_000]
    assert unsteady({("stage 0", "F"): [8 * ns for ns in STEADY], ("stage 0", "W"): small}) == ()
    assert len(unsteady({("stage 0", "W"): small})) == 1
    assert unsteady({("stage 0", "W"): [ns // 1000 for ns in small]}) == ()


def test_the_widest_comes_first_and_the_rest_is_counted() -> None:
    times = {(f"stage {k}", "F"): [1_000_000, (k + 4) * 1_000_000] for k in range(5)}
    found = unsteady(times)
    assert [spread.place for spread in found] == [f"stage {k}" for k in (4, 3, 2, 1, 0)]
    assert "and 2 more" in spread_words(found)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=9))
def test_figures_are_those_of_all_repeats(values: list[int]) -> None:
    for spread in unsteady({("stage 0", "F"): values}):
        assert (spread.fastest_ns, spread.slowest_ns) == (min(values), max(values))
        assert spread.repeats == len(values) >= 2
        assert spread.ratio >= 2


def test_a_profile_file_keeps_them() -> None:
    profile = Profile.uniform(StageCost.simple(1, 2, 3), 2)
    profile = replace(profile, unsteady=(Spread("stage 1", "W", 1, 3, 9, 5),))
    text = profile_json.dumps(profile)
    assert profile_json.loads(text).profile == profile
    with pytest.raises(UsageError, match="not in order"):
        profile_json.loads(text.replace('"fastest_ns": 1', '"fastest_ns": 5'))


def test_times_out_of_order_are_refused() -> None:
    with pytest.raises(UsageError, match="not in order"):
        Spread("stage 0", "F", 3, 2, 4, 5)
