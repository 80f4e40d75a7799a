"""The portfolio: named parts in one tuple, a lineage for every order, parts left out, where the loop ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import ablate
from benchmarks.ablation_rows import ROWS
from zbcompile.cli.main import main
from zbcompile.errors import NoOrderError, UsageError
from zbcompile.formats import profile_json, schedule_json
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.unequal import alike_problem
from zbcompile.planner.incumbent import Order
from zbcompile.planner.parts import Improve, Part, Prove, Start, search
from zbcompile.planner.placements import plan_auto
from zbcompile.planner.plan import plan
from zbcompile.planner.portfolio import NAMES, PORTFOLIO, QUICK
from zbcompile.planner.run import Effort, Options, PartRun, Run
from zbcompile.planner.starts.initial import OneAtATime
from zbcompile.planner.starts.other_problems import OtherMode, Short
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate

STAGE = StageCost.simple(30, 31, 17, 10, 4)
V_PROBLEM = Problem.of(Profile.uniform(STAGE, 4, 2), Placement.v(2), 3, 30)
SOLVING = {"quick_exact", "quick_crossing", "from_below", "crossing", "exact"}
LINE_PROBLEM = Problem.of(Profile.uniform(STAGE, 3, 2), None, 4, 20)


def inner_parts(part: Part) -> tuple[Part, ...]:
    return part.parts if isinstance(part, Short) else ()


def test_names_are_unique_words_and_each_part_is_of_one_kind() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for part in PORTFOLIO:
        assert part.name.isidentifier()
        assert sum(isinstance(part, kind) for kind in (Start, Improve, Prove)) == 1
    inner = {p.name for part in PORTFOLIO for p in inner_parts(part)} | {p.name for p in QUICK}
    assert inner <= set(NAMES)


def test_every_part_applies_somewhere_in_the_rows_of_the_ablation() -> None:
    """A row asks without variants and sizes; dynamic parts are asked where they are reached."""
    assert len(ROWS) == len({row.name for row in ROWS}) == 51
    applied = set()
    for row in ROWS:
        if any(stage.variants for stage in row.problem.profile.stages):
            continue
        run = Run(alike_problem(row.problem), time_limit_s=row.time_limit_s)
        for part in PORTFOLIO:
            if part.applies(run):
                applied.add(part.name)
            if part.name in ("classic", "one_at_a_time"):
                search(run, (part,))
    assert applied == set(NAMES)


def test_the_lineage_of_a_known_row() -> None:
    """ZB-V annealed under the times of 6.2B; a published order as it is names itself."""
    stage = StageCost.simple(29_718_000, 29_444_000, 19_927_000, 34, 16)
    problem = Problem.of(Profile.uniform(stage, 6, 527_000), Placement.v(3), 9, 6 * 34, "makespan")
    solution = plan(problem, level=1, time_limit_s=600, without={"quick_exact"})
    assert solution.certificate.lineage == ("classic ZB-V", "fold")
    assert solution.origin == "classic ZB-V > fold"
    assert schedule_json.loads(schedule_json.dumps(solution)).certificate == solution.certificate
    unit = Problem.of(Profile.uniform(StageCost.simple(1, 1, 1, 2, 1), 4), None, 8, 8)
    assert plan(unit).certificate.lineage == ("classic ZB-H1",)
    choice = plan_auto(unit.with_(placement=Placement.linear(4)))
    assert choice.solution.origin == "linear: classic ZB-H1"


@pytest.mark.parametrize("name", NAMES)
def test_without_any_part_the_order_is_legal_and_its_certificate_sound(name: str) -> None:
    for problem in (LINE_PROBLEM, V_PROBLEM, V_PROBLEM.with_(transport="rendezvous")):
        traced: list[PartRun] = []
        solution = plan(problem, level=1, time_limit_s=0.3, without=[name], trace=traced.append)
        check(solution.schedule, problem)
        certificate = solution.certificate
        assert simulate(solution.schedule, problem).value_ns == certificate.value_ns
        assert certificate.bound_ns <= certificate.value_ns
        assert name not in {part.name for part in traced}
        assert all(not step.startswith(f"{name} ") and step != name for step in certificate.lineage)


def test_without_all_starts_there_is_no_order_and_unknown_names_are_refused() -> None:
    starts = [part.name for part in PORTFOLIO if isinstance(part, Start)]
    with pytest.raises(NoOrderError, match="leave out fewer parts"):
        plan(LINE_PROBLEM, without=[*starts, "quick_exact", "exact", "crossing"])
    for call in (plan, plan_auto):
        with pytest.raises(UsageError, match=r"(?s)called 'anneel'.*classic, .*anneal, "):
            call(LINE_PROBLEM, without={"anneel", "fold"})
    with pytest.raises(UsageError, match="level"):
        plan(LINE_PROBLEM, level=0)


def test_the_command_leaves_parts_out_and_says_who_found_the_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(profile_json.dumps(LINE_PROBLEM.profile))
    words = ["plan", str(file), "--cap", "20", "--microbatches", "4", "--time-limit", "1"]
    assert main([*words, "-o", str(tmp_path / "a.json")]) == 0
    assert "found by " in capsys.readouterr().err
    assert main([*words, "--without", "classic", "--without", "anneal", "-o", str(tmp_path / "b.json")]) == 0
    assert "found by classic" not in capsys.readouterr().err
    assert main([*words, "--without", "clasic", "-o", str(tmp_path / "c.json")]) == 2
    assert "no part of the planner is called 'clasic'" in capsys.readouterr().err


@dataclass(frozen=True, slots=True)
class Probe:
    """A start that offers orders one by one and counts how often it was asked."""

    asked: list[int]
    orders: Sequence[Order]
    interrupt: bool = False
    name: str = "probe"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Always."""
        return True

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield the orders, then raise if asked to."""
        for k, order in enumerate(self.orders):
            self.asked.append(k)
            yield order
        if self.interrupt:
            raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof that the best order is the best."""

    name: str = "proof"

    def applies(self, run: Run) -> bool:
        """Always."""
        return True

    def share(self, run: Run) -> float:
        """Half of the time."""
        return 0.5

    def prove(self, run: Run) -> Iterator[Bound | Order]:
        """Claim it."""
        assert run.value is not None
        yield Bound(run.value, "proof", "span")


def test_the_loop_ends_when_the_bound_is_met() -> None:
    asked: list[int] = []
    run = Run(LINE_PROBLEM, time_limit_s=60)
    search(run, (OneAtATime(), Proof(), Probe(asked, ())))
    assert run.proved
    assert run.reserve_s == 30
    assert run.incumbent.lineage == ("one_at_a_time",)
    search(run, (Probe(asked, [Order(run.incumbent.codes or [], ("probe",))]),))
    assert asked == []


def test_the_loop_ends_with_the_time_but_not_before_there_is_an_order() -> None:
    run = Run(LINE_PROBLEM, time_limit_s=0)
    asked: list[int] = []
    other = Run(LINE_PROBLEM, time_limit_s=60)
    search(other, (OneAtATime(),))
    made = [Order(other.incumbent.codes or [], ("probe",))]
    search(run, (Probe(asked, made), Probe(asked, made)))
    assert asked == [0]
    assert run.incumbent.lineage == ("probe",)


def test_ctrl_c_in_an_inner_plan_keeps_what_it_found() -> None:
    contiguous = Problem.of(Profile.uniform(STAGE, 6, 2), Placement((0, 0, 1, 1, 2, 2)), 5, 50)
    run = Run(contiguous.with_(transport="rendezvous"), time_limit_s=60)
    with pytest.raises(KeyboardInterrupt):
        search(run, (OtherMode(lambda: (OneAtATime(), Probe([], (), interrupt=True))),))
    assert run.incumbent.lineage[-1] == "other_mode"


@pytest.mark.parametrize(
    "placement", [Placement.linear(6), Placement.looped(3), Placement((0,) * 3 + (1,) * 3)]
)
def test_leaving_out_a_part_that_changed_nothing_changes_nothing(placement: Placement) -> None:
    """What the ablation takes for granted: every part that was inert is left out in turn."""
    parts = [part for part in PORTFOLIO if part.name not in SOLVING]
    problem = Problem.of(Profile.uniform(STAGE, 6, 2), placement, 5, 45)

    def outcome(without: set[str], trace: list[PartRun]) -> tuple[Order | None, Bound]:
        options = Options(without=frozenset(without), trace=trace.append)
        run = Run(problem, options, time_limit_s=600, effort=Effort(40, 12, 60, 4, 40))
        search(run, parts)
        return run.incumbent.order, run.bound

    trace: list[PartRun] = []
    whole = outcome(set(), trace)
    inert = ablate.inert(trace)
    assert inert
    for name in inert:
        assert outcome({name}, []) == whole, name


def test_inert_parts_are_those_whose_changes_nobody_reads() -> None:
    def part(name: str, changed: str, read: str = "", depth: int = 0) -> PartRun:
        return PartRun(name, depth, 0.0, 0.0, frozenset(changed.split()), frozenset(read.split()))

    trace = [
        part("a", "known"),
        part("b", "pool"),
        part("c", "", "pool"),
        part("d", "bound"),
        part("e", "pool"),
    ]
    assert ablate.inert(trace) == {"a", "c", "e"}
    assert ablate.inert([part("a", "known"), part("b", "", "known")]) == {"b"}
    assert ablate.inert([part("a", "known", depth=1)]) == set()
    assert ablate.inert([part("a", ""), part("a", "best")]) == set()


def test_the_ablation_goes_on_where_its_log_ends(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [row for row in ROWS if row.name == "paper 1.5B p=8 m=24 cap 1p makespan"]
    plans = ablate.run(rows, NAMES, 2, log, 1)
    lines = log.read_text().splitlines()
    assert {key[1] for key in plans} == {0, 1}
    assert any(key[2] for key in plans)
    log.write_text("\n".join([*lines[:-1], lines[-1][:20]]))
    assert ablate.run(rows, NAMES, 2, log, 1).keys() == plans.keys()
    assert len(log.read_text().splitlines()) == len(lines) + 1
    text = "\n".join(ablate.table(plans))
    assert "| classic | 2 | 2 | 2 |" in text
    assert json.loads(lines[0])["row"] == rows[0].name


def test_where_no_part_makes_a_first_order_none_is_fused_or_split() -> None:
    """Under exchanges only one microbatch at a time and dispatched orders are free of deadlock here."""
    (row,) = (row for row in ROWS if row.name == "sends 6.2B looped p=4 m=18 cap 1.5p batched")
    with pytest.raises(NoOrderError):
        plan(row.problem, time_limit_s=60, level=1, seed=1, without={"one_at_a_time", "held_dispatch"})
