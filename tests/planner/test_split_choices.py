"""Choices of splits under every send mode, and why each rank splits and fuses as it does."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

import zbcompile.planner.split_choices as split_choices_module
from zbcompile.errors import UsageError
from zbcompile.planner.core.instance import BW, B, Codes, F, Fusing, Instance, W, to_codes
from zbcompile.planner.core.score import fits
from zbcompile.planner.portfolio import NAMES
from zbcompile.planner.split_choices import OURS, SplitRow, SplitTable, split_choices
from zbcompile.planner.split_reasons import MOST_EXPLAINED, Cause, Choice, RankReason, rank_reasons, saving_ns
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import TRANSPORTS, Problem
from zbcompile.schedule.solution import Solution
from zbcompile.show.split_choices import split_choices_json, split_choices_table


def two_ranks(saving: int, travel: int, cap: int | None = None, weight: int = 1) -> Problem:
    stage = StageCost(30, 30, 20, 50 - saving, 2, weight)
    return Problem.of(Profile((stage,) * 2, link=Link(travel)), None, 4, cap)


def check_table(table: SplitTable) -> None:
    none, every, ruled, ours = table.rows
    m = table.problem.num_microbatches
    for row in table.rows:
        if row.schedule is not None:
            check(row.schedule, table.problem)
    splits = {row.name: row.schedule and row.schedule.split_backwards for row in table.rows}
    count = table.problem.num_stages * m
    assert splits["none split"] == (0, count)
    assert splits["all split"] == (count, count)
    assert ours.value_ns is not None
    assert table.bound_ns is not None
    assert table.bound_ns <= ours.value_ns
    assert ours.value_ns <= min(row.value_ns for row in (none, every, ruled) if row.value_ns is not None)


def test_every_row_obeys_its_rule_and_ours_is_no_longer() -> None:
    tables = split_choices(two_ranks(saving=2, travel=5), level=1, seconds_per_row=60)
    assert [table.problem.transport for table in tables] == list(TRANSPORTS)
    for table in tables:
        check_table(table)
        ruled = table.rows[2]
        assert ruled.schedule is not None
        rows = to_codes(ruled.schedule)
        assert B not in {kind for kind, _ in rows[0]}
        backwards = [kind for kind, _ in rows[1] if kind in (B, BW)]
        assert backwards == [B, BW, BW, B]
        assert [reason.saving_ns for reason in table.reasons] == [2, 2]
        assert [reason.travel_ns for reason in table.reasons] == [None, 5]
    assert tables[0].reasons[0].fused is not None
    assert tables[0].reasons[0].fused.cause is Cause.SAVING


def test_a_shorter_row_is_ours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ends early must not lose to a choice that stands beside it."""
    problem, plan = two_ranks(saving=2, travel=5), split_choices_module.plan_whole

    def hurried(given: Problem, **options: Any) -> Solution:
        if options["fuse"] is Fusing.AUTO:
            options["without"] = {name for name in NAMES if name not in ("classic", "one_at_a_time")}
        return plan(given, **options)

    monkeypatch.setattr(split_choices_module, "plan_whole", hurried)
    for table in split_choices(problem, level=1, seconds_per_row=60):
        check_table(table)


def test_what_fusing_saves_counts_the_overhead_of_a_call() -> None:
    stage, dear = StageCost(10, 10, 10, 20, 2, 1), StageCost(16, 16, 16, 26, 2, 1)
    assert saving_ns(stage, Profile((stage,), overhead_ns=6)) == saving_ns(dear, Profile((dear,))) == 6


def test_several_stages_per_rank_obey_the_rule_too() -> None:
    stage = StageCost(10, 10, 8, 17, 2, 1)
    problem = Problem.of(Profile((stage,) * 4, link=Link(1)), Placement.v(2), 4)
    (table,) = split_choices(problem, transports=("async",), level=1, seconds_per_row=60)
    check_table(table)
    ruled = table.rows[2].schedule
    assert ruled is not None
    for rank, row in enumerate(to_codes(ruled)):
        assert {kind for kind, _ in row} == ({F, BW} if rank == 0 else {F, B, W, BW})


def timed(codes: Codes, problem: Problem, rank: int) -> tuple[Cause | None, Cause | None]:
    assert fits(Instance.of(problem), codes)
    reason = rank_reasons(codes, problem)[rank]
    return (
        None if reason.split is None else reason.split.cause,
        None if reason.fused is None else reason.fused.cause,
    )


ONE_F_ONE_B: Codes = [
    [(F, 0), (F, 0), (BW, 0), (F, 0), (BW, 0), (F, 0), (BW, 0), (BW, 0)],
    [(F, 1), (BW, 1), (F, 1), (BW, 1), (F, 1), (BW, 1), (F, 1), (BW, 1)],
]


def test_what_fusing_saves_decides_where_a_split_would_pay_without_it() -> None:
    stage = StageCost(30, 30, 4, 30, 2, 1)
    problem = Problem.of(Profile((stage, stage)), None, 4)
    assert timed(ONE_F_ONE_B, problem, 1) == (None, Cause.SAVING)


def test_memory_decides_where_a_split_would_pay_and_does_not_fit() -> None:
    problem = two_ranks(saving=0, travel=0, cap=4, weight=3)
    reason = rank_reasons(ONE_F_ONE_B, problem)[0]
    assert reason.fused is not None
    assert reason.fused.cause is not Cause.MEMORY  # it would fit nowhere, and would gain nothing either
    narrow = two_ranks(saving=0, travel=0, cap=2, weight=3).with_(caps=(None, 2))
    last = rank_reasons(ONE_F_ONE_B, narrow)[1].fused
    assert last is not None
    assert (last.cause, last.fits) == (Cause.MEMORY, False)
    assert last.change_ns is not None
    assert last.change_ns < 0


def test_travel_decides_where_a_split_hides_it_and_nothing_else() -> None:
    """Rank 0 waits for the gradient only as long as it travels: that is what sending it before W hides."""
    first, last = StageCost(10, 10, 10, 20, 2, 1), StageCost(5, 5, 10, 15, 2, 1)
    row = [(F, 1), (B, 1), (W, 1)] * 4
    travels = {}
    for travel in (0, 10):
        problem = Problem.of(Profile((first, last), link=Link(travel)), None, 4)
        travels[travel] = timed([ONE_F_ONE_B[0], row], problem, 1)[0]
    assert travels[10] is Cause.TRAVEL
    assert travels[0] is not Cause.TRAVEL


def test_a_send_that_holds_its_rank_decides_under_batched() -> None:
    """Rank 1's second gradient leaves with the next exchange: a split makes it two exchanges."""
    codes: Codes = [
        [(F, 0), (F, 0), (BW, 0), (F, 0), (B, 0), (F, 0), (BW, 0), (W, 0), (BW, 0)],
        [(F, 1), (B, 1), (F, 1), (BW, 1), (F, 1), (B, 1), (F, 1), (B, 1), (W, 1), (W, 1), (W, 1)],
    ]
    assert timed(codes, two_ranks(2, 5).with_(transport="batched"), 1) == (Cause.WAITS, Cause.SENDS)


def test_what_cannot_be_answered_is_refused() -> None:
    problem = two_ranks(0, 0)
    with pytest.raises(UsageError, match="alike"):
        split_choices(problem.with_(microbatch_costs=tuple(MicrobatchCost.of(k, 1) for k in (1, 2, 1, 1))))
    with pytest.raises(UsageError, match="negative"):
        split_choices(problem, seconds_per_row=-1)
    wide = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 64), None, 64)
    assert MOST_EXPLAINED < 3 * 64 * 64 * 64
    with pytest.raises(UsageError, match="too large to say why"):
        split_choices(wide)


def test_sentences_stand_under_their_send_mode_and_equal_ranks_share_one() -> None:
    problem = Problem.of(Profile.uniform(StageCost(2, 2, 2, 4, 2, 1), 3), None, 3)
    tie, waits = Choice(3, 0, True, Cause.TIE), Choice(3, 4, True, Cause.WAITS)
    reasons = (
        RankReason(0, tie, None, 0, None),
        RankReason(1, waits, None, 0, 1),
        RankReason(2, waits, None, 0, 1),
    )
    made = SplitTable(problem, (SplitRow(OURS),), 9, reasons)
    out = io.StringIO()
    Console(file=out, width=100).print(split_choices_table([made, made]))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    said = [
        "async:",
        "rank 0 splits all 3 (fused, the step would be as long).",
        "each of ranks 1 and 2 splits all 3 (fused, the step would be 4 ns longer: W fills waits).",
    ]
    first = lines.index("async:")
    assert lines[first : first + 6] == said * 2
    assert split_choices_json([made])["transports"][0]["ranks"][1]["why"].startswith("rank 1 splits")  # type: ignore[index]
