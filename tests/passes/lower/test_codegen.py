"""Emitted programs: they do the order and nothing else, fold, stay the same bytes, and carry no foreign
text."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import greedy_order, problems
from zbcompile.errors import CheckError, UsageError
from zbcompile.passes.lower import merge_backward as merge_module
from zbcompile.passes.lower.codegen import emit
from zbcompile.passes.lower.fold import Loop, fold
from zbcompile.passes.lower.insert_comm import insert_comm
from zbcompile.passes.lower.merge_backward import merge_backward
from zbcompile.passes.lower.slot_clock import SlotClock
from zbcompile.planner.core.instance import Fusing, is_numbered, shaped, to_codes, to_schedule
from zbcompile.planner.starts.classic import one_f_one_b
from zbcompile.runtime.program import Program
from zbcompile.schedule.check import check, is_well_formed, judge
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.memory import memory_peaks
from zbcompile.schedule.problem import OBJECTIVES, TRANSPORTS, Problem
from zbcompile.schedule.simulate import simulate, timeline_of
from zbcompile.schedule.solution import Certificate

_KIND_OF = {
    "forward": Kind.FORWARD,
    "backward_input": Kind.BACKWARD_INPUT,
    "backward_weight": Kind.BACKWARD_WEIGHT,
    "full_backward": Kind.FULL_BACKWARD,
    "send_forward": Kind.SEND_F,
    "recv_forward": Kind.RECV_F,
    "send_backward": Kind.SEND_B,
    "recv_backward": Kind.RECV_B,
}


class Listener:
    """A rank that only notes what its program calls."""

    def __init__(self) -> None:
        self.heard: list[Action | str] = []

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*numbers: int) -> Iterator[None]:
            kind = _KIND_OF.get(verb)
            self.heard.append(verb if kind is None else Action(kind, *numbers))
            return iter(())

        return call


def heard(text: str) -> list[Action | str]:
    listener = Listener()
    for _ in Program.load(text, 0).start(listener):
        pass
    return listener.heard


def classic(name: str, p: int, m: int) -> Schedule:
    """1F1B, or ZB-H1 with its W's right after the B's of rank order, written out here."""
    order = []
    for stage in range(p):
        row, warm = [Action(Kind.FORWARD, stage, i) for i in range(min(p - stage, m))], min(p - stage, m)
        for i in range(m):
            if name == "1f1b":
                row.append(Action(Kind.FULL_BACKWARD, stage, i))
            else:
                row.append(Action(Kind.BACKWARD_INPUT, stage, i))
                if i >= stage:
                    row.append(Action(Kind.BACKWARD_WEIGHT, stage, i - stage))
            if warm + i < m:
                row.append(Action(Kind.FORWARD, stage, warm + i))
        if name != "1f1b":
            row += [Action(Kind.BACKWARD_WEIGHT, stage, i) for i in range(max(0, m - stage), m)]
        order.append(row)
    return Schedule.of(Placement.linear(p), m, order)


def virtual(placement: Placement, m: int) -> Schedule:
    """All forwards stage by stage, then all backwards: legal on any placement."""
    order: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for stage, rank in enumerate(placement.rank_of):
        order[rank] += [Action(Kind.FORWARD, stage, i) for i in range(m)]
    for stage, rank in reversed(list(enumerate(placement.rank_of))):
        order[rank] += [Action(Kind.FULL_BACKWARD, stage, i) for i in range(m)]
    return Schedule.of(placement, m, order)


def milliseconds(schedule: Schedule, transport: str = "async") -> Problem:
    stage = StageCost.simple(2_000_000, 2_100_000, 1_300_000, 6 << 20, 3 << 20)
    profile = Profile((stage,) * schedule.num_stages, link=Link(20_000))
    return Problem.of(profile, schedule.placement, schedule.num_microbatches, 1 << 30, transport=transport)


CASES = {
    "1f1b_p4_m12": (classic("1f1b", 4, 12), "async"),
    "zb_h1_p4_m12": (classic("zb", 4, 12), "async"),
    "zb_h1_p2_m2": (classic("zb", 2, 2), "async"),
    "1f1b_p3_m8_rendezvous": (classic("1f1b", 3, 8), "rendezvous"),
    "1f1b_p3_m8_batched": (classic("1f1b", 3, 8), "batched"),
    "v_p2_m6": (virtual(Placement.v(2), 6), "async"),
    "looped_p3_m6": (virtual(Placement.looped(3), 6), "async"),
    "map_p3_m4": (virtual(Placement((2, 0, 1, 0)), 4), "async"),
}


@pytest.mark.parametrize("name", CASES)
def test_programs_are_the_golden_ones(name: str, golden: Callable[[str, str], None]) -> None:
    schedule, transport = CASES[name]
    problem = milliseconds(schedule, transport)
    lowered = insert_comm(schedule, problem)
    certificate = Certificate("span", lowered.value_ns, lowered.value_ns, "work")
    texts = emit(lowered.schedule, problem, certificate, lowered.send_slots)
    assert texts == emit(lowered.schedule, problem, certificate, lowered.send_slots)
    golden(f"program_{name}.txt", "\n\n".join(texts))


@given(problems(), st.randoms(use_true_random=False), st.sampled_from(["async", "rendezvous", "batched"]))
def test_a_program_does_its_order_and_nothing_else(problem: Problem, random: Any, transport: str) -> None:
    schedule = insert_communication(greedy_order(problem, random), problem)
    problem = problem.with_(transport=transport)
    try:
        texts = emit(schedule, problem)
    except CheckError:
        assert transport != "async", "only transports that hold the rank can make a circle"
        return
    for text, row in zip(texts, schedule.order, strict=True):
        calls = heard(text)
        assert [c for c in calls if isinstance(c, Action)] == list(row)
        words = [c for c in calls if isinstance(c, str)]
        assert words[-2:] == ["wait_sent", "reduce_gradients"]
        assert set(words[:-2]) <= {"rendezvous": {"settle_sends"}, "batched": {"settle"}}.get(
            transport, set()
        )


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 3)), max_size=5))
def test_folding_loses_nothing(parts: list[tuple[int, int, int]]) -> None:
    row: list[Action | None] = []
    for stage, count, step in parts:
        for i in range(count):
            row += [Action(Kind.FORWARD, stage, i * step), Action(Kind.FULL_BACKWARD, stage, i * step + 1)]
            row += [None] if step == 2 else []
    unrolled: list[Action | None] = []
    for piece in fold(row):
        if not isinstance(piece, Loop):
            unrolled.append(piece)
            continue
        for turn in range(piece.count):
            for action in piece.body:
                moved = None
                if action is not None:
                    moved = Action(action.kind, action.stage, action.microbatch + turn * piece.step)
                unrolled.append(moved)
    assert unrolled == row


def test_the_length_of_a_program_does_not_grow_with_the_microbatches() -> None:
    def lines(m: int) -> list[int]:
        schedule = classic("zb", 4, m)
        problem = milliseconds(schedule)
        return [text.count("\n") for text in emit(insert_comm(schedule, problem).schedule, problem)]

    assert lines(20) == lines(200)


def test_only_numbers_of_a_schedule_reach_the_text() -> None:
    schedule = classic("1f1b", 2, 3)
    evil = '"""\nimport os\n'
    stage = StageCost(1, 1, 1, 2, 2, 1, name=evil)
    problem = Problem.of(Profile((stage, stage), source=evil), num_microbatches=3)
    certificate = Certificate(evil, 10, 10, evil, {evil: evil})
    for text in emit(insert_comm(schedule, problem).schedule, problem, certificate):
        assert "import" not in text
        tree = ast.parse(text)
        kinds = {type(node) for node in tree.body}
        assert kinds == {ast.Expr, ast.Assign, ast.FunctionDef}


def test_a_program_without_its_messages_is_refused() -> None:
    schedule = classic("1f1b", 2, 2)
    with pytest.raises(UsageError, match="sends and receives"):
        emit(schedule, milliseconds(schedule))


@given(problems(), st.randoms(use_true_random=False))
def test_insert_comm_takes_the_smallest_slots_that_cost_no_time(problem: Problem, random: Any) -> None:
    schedule = greedy_order(problem, random)
    lowered = insert_comm(schedule, problem)
    check(lowered.schedule, problem)
    assert lowered.schedule.compute_only() == schedule
    if lowered.send_slots is not None:
        graph = EventGraph(lowered.schedule, problem, lowered.send_slots)
        assert graph.earliest() is not None
    assert lowered.value_ns <= insert_comm(schedule, problem).value_ns
    assert lowered.value_ns <= simulate(insert_communication(schedule, problem, 10_000), problem).value_ns


@given(problems(), st.randoms(use_true_random=False))
def test_merging_never_makes_an_order_longer_or_larger(problem: Problem, random: Any) -> None:
    schedule = greedy_order(problem, random, fuse=0.0)
    problem = problem.with_(caps=tuple(memory_peaks(schedule, problem)))
    merged = merge_backward(schedule, problem)
    check(merged, problem)
    assert simulate(merged, problem).value_ns <= simulate(schedule, problem).value_ns
    again = merge_backward(merged, problem)
    check(again, problem)


def test_a_backward_nobody_waits_for_is_merged_and_one_that_is_waited_for_is_not() -> None:
    schedule = Schedule.parse(
        """placement 0 1
        microbatches 1
        rank 0: 0F0 0B0 0W0
        rank 1: 1F0 1B0 1W0"""
    )
    problem = Problem.of(Profile.uniform(StageCost.simple(10, 10, 10), 2)).with_(objective="makespan")
    assert str(merge_backward(schedule, problem).order[0][-1]) == "0BW0"
    assert str(merge_backward(schedule, problem).order[1][-1]) == "1W0"


def test_judgements_of_merges_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long orders are judged a few times only, large groups first; the order stays as short."""
    problem = Problem.of(Profile.uniform(StageCost.simple(10, 9, 3), 6, 2), None, 12, 30)
    schedule = to_schedule(shaped(one_f_one_b(6, 12), Fusing.NEVER), problem)
    free = merge_backward(schedule, problem)
    judged: list[Schedule] = []

    def counted(order: Schedule, given: Problem) -> Any:
        judged.append(order)
        return judge(order, given)

    monkeypatch.setattr(merge_module, "judge", counted)
    assert merge_backward(schedule, problem) == free
    assert judged == []  # the planner's own clock is faster and says the same
    monkeypatch.setattr(merge_module, "_quick_times", lambda *_: None)
    assert merge_backward(schedule, problem) == free
    assert len(judged) > 8
    judged.clear()
    actions = sum(map(len, schedule.order))
    monkeypatch.setattr(merge_module, "MOST_JUDGED", 8 * actions)
    merged, value = merge_module.merge_backward_timed(schedule, problem)
    assert len(judged) <= 8
    check(merged, problem)
    assert value == simulate(merged, problem).value_ns <= simulate(schedule, problem).value_ns


@given(problems(), st.randoms(use_true_random=False), st.sampled_from(TRANSPORTS), st.booleans())
def test_the_quick_clock_of_merges_changes_nothing(
    problem: Problem, random: Any, transport: str, numbered: bool
) -> None:
    """Orders numbered as the planner does it, and others, are merged as the judge alone would have it."""
    schedule = greedy_order(problem, random, fuse=0.1)
    problem = problem.with_(transport=transport, caps=tuple(memory_peaks(schedule, problem)))
    if numbered:
        schedule = to_schedule(to_codes(schedule), problem)
    assert is_numbered(schedule) == (to_schedule(to_codes(schedule), problem) == schedule)
    results = []
    for quick in (merge_module._quick_times, lambda *_: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merge_module, "_quick_times", quick)
            try:
                results.append(merge_module.merge_backward_timed(schedule, problem))
            except CheckError as error:
                results.append(str(error))
    assert results[0] == results[1]


@given(problems(), st.randoms(use_true_random=False), st.sampled_from([1, 2, 3, 99]))
def test_the_slot_clock_equals_the_event_graph(problem: Problem, random: Any, depth: int) -> None:
    schedule = greedy_order(problem, random)
    assert is_well_formed(schedule, problem)
    placed = insert_communication(schedule, problem, depth)
    order = SlotClock(schedule, problem).placed(depth)
    for slots in (1, 2, 3, None):
        for objective in OBJECTIVES:
            asked = problem.with_(objective=objective)
            graph = EventGraph(placed, asked, slots)
            value = None if graph.earliest() is None else timeline_of(graph).value_ns
            order.clock.objective = objective
            assert order.value(slots) == value


@given(problems(), st.randoms(use_true_random=False))
def test_orders_that_are_not_well_formed_are_faulty(problem: Problem, random: Any) -> None:
    """Whatever the clocks are not asked about, the judge refuses; what it takes, they are asked about."""
    schedule = greedy_order(problem, random)
    rows = [list(row) for row in schedule.order]
    row = random.choice(rows)
    where = random.randrange(len(row))
    action = row.pop(where)
    if random.random() < 0.8:
        row.insert(random.randrange(len(row) + 1), action)
    changed = Schedule.of(schedule.placement, schedule.num_microbatches, rows)
    found, _ = judge(changed, problem)
    assert is_well_formed(changed, problem) or found


@given(problems(), st.randoms(use_true_random=False))
def test_a_known_value_saves_work_and_changes_nothing(problem: Problem, random: Any) -> None:
    schedule = greedy_order(problem, random)
    value = simulate(schedule, problem).value_ns
    assert insert_comm(schedule, problem, compute_ns=value) == insert_comm(schedule, problem)
