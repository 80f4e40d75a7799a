"""What if: a change is what its name says, and no row is worse than an order that is known for it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.places import EXAMPLES
from tests.support.planner_cases import V_STAGE
from zbcompile.cli.changes import read_changes, usual_changes
from zbcompile.errors import UsageError
from zbcompile.formats import schedule_json
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.changes import Change
from zbcompile.planner.core.instance import Fusing
from zbcompile.planner.what_if import Outcome, activation_worth, what_if
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.show.what_if import WhatIf, what_if_json, what_if_table

FILE = schedule_json.loads((EXAMPLES / "four-unequal-stages.schedule.json").read_text())
PROBLEM = FILE.problem
assert PROBLEM is not None


def read(text: str, problem: Problem = PROBLEM) -> Change:
    (change,) = read_changes([text], problem)
    return change


def test_changes_are_what_they_say() -> None:
    cap, saved = 12 << 30, [stage.saved_bytes for stage in PROBLEM.profile.stages]
    assert read("memory=+20%").problem.caps == (int(cap * 1.2),) * 4
    assert read("memory=+2").problem.caps == tuple(cap + 2 * n for n in saved)
    assert read("memory=+1GiB").problem.caps == (13 << 30,) * 4
    assert read("memory=none").problem.caps == (None,) * 4
    least = read("memory=least").problem.caps
    assert max(c or 0 for c in least) == 8375186227
    link = PROBLEM.profile.link
    assert read("link=2x").problem.profile.link == Link(link.latency_ns // 2, 2 * link.bytes_per_second)
    slow = read("link=2-3:+10ms").problem
    for pair in ((2, 3), (3, 2)):
        assert slow.profile.link_between(*pair) == replace(link, latency_ns=link.latency_ns + 10_000_000)
    assert slow.profile.link_between(0, 1) == link
    assert read("split=all").fusing is Fusing.NEVER
    assert read("split=none").fusing is Fusing.ALWAYS
    assert read("microbatches=+3").problem.num_microbatches == 11
    assert not read("microbatches=+3").same_actions


def test_a_barrier_costs_the_makespan_and_its_absence_the_bytes_that_undo_an_update() -> None:
    assert read("barrier=step").problem == PROBLEM.with_(objective="makespan")
    assert read("barrier=none:1GiB").problem.caps == (11 << 30,) * 4
    sizes = (100, 200, 300, 400)
    stages = (replace(s, gradient_bytes=size) for s, size in zip(PROBLEM.profile.stages, sizes, strict=True))
    known = PROBLEM.with_(profile=replace(PROBLEM.profile, stages=tuple(stages)), objective="makespan")
    without = read("barrier=none", known).problem
    assert without.objective == "span"
    assert without.caps == tuple((12 << 30) - 3 * size for size in sizes)
    free = known.with_(caps=())
    assert read("barrier=none:1GiB", free).problem == free.with_(objective="span")
    names = [change.name for change in usual_changes(known, 10**9, None)]
    assert "with a barrier (makespan)" not in names
    assert names[-1] == "without a barrier (span)"
    base, row = what_if(PROBLEM, FILE.schedule, [read("barrier=step")], time_limit_s=2.0)
    assert (base.objective, row.objective) == ("span", "makespan")
    assert row.value_ns == simulate(FILE.schedule.compute_only(), PROBLEM).makespan_ns


def test_halves_of_stages_add_up_to_the_stages() -> None:
    change = read("placement=v")
    assert change.problem.placement == Placement.v(4)
    halves, stages = change.problem.profile.stages, PROBLEM.profile.stages
    for name in ("forward_ns", "backward_input_ns", "full_backward_ns", "saved_bytes", "static_bytes"):
        pairs = [getattr(a, name) + getattr(b, name) for a, b in zip(halves[::2], halves[1::2], strict=True)]
        assert pairs == [getattr(stage, name) for stage in stages], name
    assert {(e.source, e.target) for e in change.problem.profile.edges} == {(s, s + 1) for s in range(7)}


REFUSED = {
    "memory=20%": "no change",
    "memory=+": "amount of memory",
    "memory=+9000000GiB": "too much memory",
    "link=9-3:2x": "no link",
    "link=2-2:2x": "no link",
    "link=0-3:2x": "nothing is sent",
    "link=1x": "no change",
    "link=2-3:fast": "no change",
    "split=some": "no change",
    "placement=linear": "placed so already",
    "placement=0,0,1,1": "same ranks",
    "microbatches=+0": "no change",
    "microbatches=+999999": "microbatches",
    "barrier=some": "no change",
    "barrier=none": "how large the gradients are",
    "barrier=none:": "amount of memory",
    "plan.json": "no change",
    "": "no change",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_change_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=REFUSED[text]):
        read(text)


def test_rows_are_legal_and_no_worse_than_what_is_known() -> None:
    texts = [
        "memory=+1",
        "memory=+20%",
        "link=2x",
        "link=2-3:+10ms",
        "split=all",
        "split=rule",
        "memory=least",
    ]
    given = simulate(FILE.schedule, PROBLEM).value_ns
    changes = read_changes(texts, PROBLEM)
    base, *rows = what_if(PROBLEM, FILE.schedule, changes, time_limit_s=6)
    assert base.value_ns == base.bound_ns == given
    for change, row in zip(changes, rows, strict=True):
        assert row.value_ns is not None
        assert row.schedule is not None
        assert row.bound_ns is not None
        assert row.bound_ns <= row.value_ns
        check(row.schedule, change.problem)
        assert simulate(row.schedule, change.problem).value_ns == row.value_ns
    found = WhatIf(PROBLEM, given, base, rows, None)
    assert [found.gain(row) for row in rows[:5]] == [-50_000_000, -75_000_000, -4_086_534, 20_000_000, 0]
    assert all(found.settled(row) for row in rows[:5])
    assert what_if_json(found)["changes"][3]["name"] == "the link 2-3 slower by 10ms"  # type: ignore[index]


@pytest.mark.parametrize(
    ("row", "cell", "note"),
    [
        ((90, 90), "-10 ns (-10.0 %)", None),
        ((90, 80), "~-10 ns (-10.0 %)", "but not which is shorter"),
        ((98, 80), "~-2 ns (-2.0 %)", "but not which is shorter"),
        ((101, 80), "~+1 ns (+1.0 %)", "do not settle which is shorter"),
        ((100, 80), "~the same", "do not settle which is shorter"),
    ],
)
def test_an_amount_is_marked_unless_both_values_are_proved(
    row: tuple[int, int], cell: str, note: str | None
) -> None:
    """That the bounds settle which is shorter says nothing of by how much."""
    base, changed = Outcome("as it is", 100, 100), Outcome("changed", *row)
    made = WhatIf(PROBLEM, 100, base, [changed], None)
    out = io.StringIO()
    Console(file=out, width=100).print(what_if_table(made))
    assert cell in out.getvalue()
    assert ("~" in out.getvalue()) == (not made.exact(changed)) == (row[0] != row[1])
    assert note is None or note in " ".join(out.getvalue().split())
    assert what_if_json(made)["changes"][0]["settled_by_bounds"] is (row[0] < 100)  # type: ignore[index]


def test_a_row_that_nothing_fits_says_why() -> None:
    tight = PROBLEM.with_(caps=(5 << 30,) * 4)
    (row,) = [*what_if(PROBLEM, FILE.schedule, [Change("less", tight)], time_limit_s=2)][1:]
    assert row.value_ns is None
    assert "no order fits" in row.why_not


def test_the_worth_of_an_activation_is_that_of_the_bound_and_of_the_formula() -> None:
    """Equal stages in a V: each activation is worth f + b + w, while the formula gives the bound."""
    p, saved = 6, V_STAGE.saved_bytes
    profile = Profile.uniform(V_STAGE, 2 * p, 500)
    problem = Problem.of(profile, Placement.v(p), 18, cap=(p + 3) * saved)
    worth = activation_worth(problem)
    assert worth is not None
    assert worth.formula_ns is not None
    work = 18 * 2 * V_STAGE.work_ns
    assert worth.bound_ns == best_bound(problem).value_ns == work + worth.formula_ns
    assert worth.bound_ns - worth.more_ns == V_STAGE.work_ns
    unequal = Profile((*profile.stages[:-1], replace(V_STAGE, forward_ns=1)), link=Link(500))
    other = activation_worth(problem.with_(profile=unequal))
    assert other is not None
    assert other.formula_ns is None
    assert activation_worth(problem.with_(caps=(None,) * p)) is None
    nothing = Profile.uniform(StageCost.simple(1, 1, 1, 0, 0), 2 * p)
    assert activation_worth(problem.with_(profile=nothing)) is None


def test_the_usual_changes_leave_out_what_changes_nothing() -> None:
    names = [change.name for change in usual_changes(PROBLEM, 881_173_068, (0, 1))]
    assert names[:4] == [
        "memory for 1 more microbatch",
        "20 % more memory",
        "all links 2 times as fast",
        "the link 0-1 slower by 10ms",
    ]
    free = PROBLEM.with_(caps=(None,) * 4, profile=replace(PROBLEM.profile, link=Link()))
    rest = [change.name for change in usual_changes(free, 50, None)]
    assert not any("memory" in name or "link" in name for name in rest)
    assert "split by the rule of thumb" in rest
