"""Annealing by halving: how the tries are shared out, and what the time changes about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zbcompile.planner.improve import halving
from zbcompile.planner.improve.halving import Anneal
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Effort, Options, Run
from zbcompile.planner.starts.offset_key_orders import OffsetKeyOrders
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem

pytestmark = pytest.mark.timeout(600)  # kernels may have to be compiled

EFFORT = Effort(12, 12, 40, 4, 0)
TIGHT, HALF = 4, 8
"""Caps of p = 4 in activations of half a stage: V-Min's memory, and ZB-V's."""


def run_of(cap: int, options: Options | None = None) -> Run:
    """Equal stages in a V on four ranks, eight microbatches."""
    profile = Profile.uniform(StageCost.simple(2, 2, 1, 2, 1), 8)
    problem = Problem.of(profile, Placement.v(4), 8, 2 * cap)
    return Run(problem, options, time_limit_s=600, effort=EFFORT)


def rounds_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Anneal the first orders; return (orders, tries per order) of every round."""
    seen: list[tuple[int, int]] = []
    whole = halving._round

    def count(
        run: Run, starts: list[halving._Annealed], tries: int, used: int
    ) -> Iterator[halving._Annealed]:
        seen.append((len(starts), tries))
        return whole(run, starts, tries, used)

    monkeypatch.setattr(halving, "_round", count)
    orders: list[Order] = list(OffsetKeyOrders().propose(run))
    run.join([run.scored(order) for order in orders])
    assert list(Anneal().improve(run))
    return seen


def test_little_memory_gives_most_tries_to_the_last_two(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(TIGHT, Options(level=1))
    assert run.is_tight
    (orders, tries), *further = rounds_of(run, monkeypatch)
    assert orders > EFFORT.orders
    assert tries == 40
    assert further[0] == (orders // 4, 160)
    assert further[1][1] == 480
    assert further[2] == (2, 2880)
    assert max(count * tries for count, tries in [(orders, 40), *further[:2]]) < 2 * 2880


def test_other_memory_keeps_thirds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(HALF, Options(level=1))
    assert not run.is_tight
    (orders, tries), *further = rounds_of(run, monkeypatch)
    assert 2 <= orders <= EFFORT.orders
    assert tries == 40
    assert further == [(2, 120), (2, 360), (2, 1080)]


def test_planned_tries_are_those_of_all_rounds_to_come() -> None:
    assert halving._planned(88, 10, halving._SIEVE) == 88 * 10 + 22 * 40 + 7 * 120 + 2 * 720
    assert halving._planned(12, 10, halving._THIRDS) == 12 * 10 + 4 * 30 + 2 * 90 + 2 * 270


@pytest.mark.parametrize(
    ("cap", "level", "most"), [(TIGHT, None, halving._LONGER), (TIGHT, 1, 1.0), (HALF, None, 1.0)]
)
def test_rounds_are_longer_only_under_little_memory_and_where_the_time_alone_decides(
    cap: int, level: int | None, most: float
) -> None:
    """At a pace of a million tries in a thousandth of a second there is time for more."""
    pace = halving._Pace(run_of(cap, Options(level=level)))
    assert pace.share(1000) == 1.0
    pace.done = 10**12
    pace.began -= 1.0
    assert pace.share(1000) == most
    pace.done = 1
    assert pace.share(10**9) < 1e-3


def test_little_memory_tries_fewer_recipes_of_dispatch() -> None:
    profile = Profile.uniform(StageCost.simple(2, 2, 1, 2, 1), 8)
    few, all_of_them = (
        Run(Problem.of(profile, Placement.v(4), 8, 2 * cap), time_limit_s=10).effort for cap in (TIGHT, HALF)
    )
    assert 0 < few.dispatches == all_of_them.dispatches // 4
    assert few.anneal == all_of_them.anneal


def test_a_part_of_another_run_and_many_microbatches_do_not_sieve() -> None:
    run = run_of(TIGHT)
    assert run.sieves
    assert not run.inner(run.problem, 1.0).sieves
    profile = Profile.uniform(StageCost.simple(2, 2, 1, 2, 1), 8)
    many = Run(Problem.of(profile, Placement.v(4), 17, 2 * TIGHT), time_limit_s=10)
    assert many.is_tight
    assert not many.sieves


@pytest.mark.parametrize(
    ("seconds", "level", "whole"), [(600, None, True), (0.3, None, False), (0.3, 1, True)]
)
def test_little_time_makes_the_first_look_shorter_and_counts_do_not(
    seconds: float, level: int | None, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(TIGHT, Options(level=level))
    orders = [run.scored(order) for order in OffsetKeyOrders().propose(run)] * 20
    monkeypatch.setattr(type(run.incumbent), "seconds_left", property(lambda _: seconds))
    starts = halving._whole(run, orders)
    looked_at, tries = halving._first_look(run, starts, 20_000)
    assert (looked_at == starts) == (tries == 20_000) == whole
    if not whole:
        assert halving._FEWEST <= len(looked_at) < len(starts)
        assert looked_at[0] is starts[0]
        assert looked_at[-1] in starts[len(starts) // 2 :]
