"""Send modes as objects: two that only the tests define run through every part, no other file names one."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zbcompile
from tests.passes.lower.test_codegen import classic, heard, milliseconds
from tests.planner.improve.test_fuse import random_fusing_problem
from tests.schedule.test_event_graph import Machine
from tests.support.other_send_modes import BUFFERED, DRAINED, OTHER_MODES, other_send_modes
from tests.support.planner_cases import brute_force
from tests.support.strategies import greedy_order, problems
from zbcompile.errors import CheckError, UsageError
from zbcompile.passes.lower.codegen import emit
from zbcompile.passes.lower.insert_comm import insert_comm
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.bounds.blocking_send import blocking_send_bound
from zbcompile.planner.certify.certificate import verify
from zbcompile.planner.core.instance import to_codes, to_schedule
from zbcompile.planner.core.times import Clock
from zbcompile.planner.plan import plan
from zbcompile.schedule.check import check, checked_times
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.ir import Action, Placement
from zbcompile.schedule.problem import TRANSPORTS, Problem
from zbcompile.schedule.semantics import ASYNC, BATCHED, RENDEZVOUS, SEND_MODES, send_mode
from zbcompile.schedule.simulate import simulate

NAMES = tuple(mode.name for mode in OTHER_MODES)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with other_send_modes():
        yield


class OtherMachine(Machine):
    """The made-up hardware of the event graph's tests, with the tests' own send modes written out by hand."""

    def _held(self, rank: int, action: Action) -> int | None:
        begin, sent = self.clock[rank], self.open[rank]
        due = sent[: max(0, len(sent) - 2)]
        if self.problem.transport == "drained":
            due = list(sent) if action.kind.is_compute else []
        for message in due:
            if message not in self.arrived:
                return None
            begin = max(begin, self.arrived[message])
        self.open[rank], self.clock[rank] = sent[len(due) :], begin
        return begin


@settings(max_examples=60)
@given(problems(), st.randoms(use_true_random=False), st.integers(1, 4), st.sampled_from(NAMES))
def test_a_new_mode_has_the_times_and_deadlocks_of_a_machine_that_does_it(
    problem: Problem, rng: Any, depth: int, name: str
) -> None:
    problem = problem.with_(transport=name)
    schedule = insert_communication(greedy_order(problem, rng), problem, depth)
    graph, start = EventGraph(schedule, problem), OtherMachine(schedule, problem, None).run()
    early = graph.earliest()
    assert (early is None) == (start is None)
    for rank, row in enumerate(schedule.order if early and start else ()):
        for k, action in enumerate(row):
            assert not action.kind.is_compute or early[graph.node_of[rank][k]] == start[action]


@settings(max_examples=60)
@given(problems(), st.randoms(use_true_random=False), st.sampled_from((*NAMES, *TRANSPORTS)))
def test_the_planner_s_clock_gives_the_times_of_simulate(problem: Problem, rng: Any, name: str) -> None:
    problem = problem.with_(transport=name)
    codes = to_codes(greedy_order(problem, rng))
    schedule, pair = to_schedule(codes, problem), Clock.of(problem).measure(codes)
    try:
        found = simulate(schedule, problem)
    except CheckError:
        assert pair is None
        return
    check(found.schedule, problem)
    assert pair == (found.span_ns, found.makespan_ns)
    assert checked_times(found.schedule, problem).start == found.start


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("placement", [Placement.linear(3), Placement.v(2)])
def test_a_new_mode_is_planned_and_its_certificate_is_derived_again(name: str, placement: Placement) -> None:
    profile = Profile.uniform(StageCost.simple(20, 21, 13, 2, 1), placement.num_stages, latency_ns=3)
    problem = Problem.of(profile, placement, 3, 8, transport=name)
    solution = plan(problem, time_limit_s=0.5)
    assert verify(solution) == []
    assert simulate(solution.schedule, problem).value_ns == solution.certificate.value_ns


@pytest.mark.parametrize("name", NAMES)
def test_bounds_hold_over_all_orders_of_a_new_mode(name: str) -> None:
    rng = random.Random(5)
    for _ in range(6):
        problem = random_fusing_problem(rng, name)
        bounds = [best_bound(problem), blocking_send_bound(problem)]
        assert (bounds[1] is None) == (name == "buffered")
        least = brute_force(problem, fusing=True)
        assert all(bound is None or bound.value_ns <= least for bound in bounds)


def test_travel_counts_as_work_only_where_every_message_has_arrived_before_the_next_action() -> None:
    """One F of 10 ns and one message of 100 ns, then a second F: it runs at 10 ns or at 110 ns."""
    assert [mode.travel_is_work for mode in SEND_MODES] == [False, True, True]
    profile = Profile.uniform(StageCost.simple(10, 1, 1, 1, 0), 2, latency_ns=100)
    starts = {}
    for mode in (ASYNC, RENDEZVOUS, BATCHED, *OTHER_MODES):
        problem = Problem.of(profile, None, 2, transport=mode.name)
        timeline = simulate(classic("1f1b", 2, 2), problem)
        row = [a for a in timeline.schedule.order[0] if a.kind.is_compute]
        begin = timeline.start[0][timeline.schedule.order[0].index(row[1])]
        starts[mode.name] = (begin, mode.travel_is_work)
    assert starts == {
        "async": (10, False),
        "rendezvous": (110, True),
        "batched": (110, True),
        "buffered": (10, False),
        "drained": (110, True),
    }


@pytest.mark.parametrize("mode", OTHER_MODES, ids=NAMES)
def test_a_new_mode_s_program_waits_where_the_mode_says(mode: Any) -> None:
    problem = milliseconds(classic("1f1b", 3, 8), mode.name)
    lowered = insert_comm(classic("1f1b", 3, 8), problem)
    assert lowered.send_slots is None
    for text, row in zip(emit(lowered.schedule, problem), lowered.schedule.order, strict=True):
        calls = heard(text)
        assert [call for call in calls if isinstance(call, Action)] == list(row)
        settled = [k for k, call in enumerate(calls) if isinstance(call, str) and call == "settle_sends"]
        assert len(re.findall(r"settle_sends\(2\)" if mode is BUFFERED else r"settle_sends\(\)", text)) > 0
        sent = {k for k, call in enumerate(calls) if isinstance(call, Action) and call.kind.is_send}
        for k in settled:
            before = len([x for x in sent if x < k])
            assert before > 2 if mode is BUFFERED else k - 1 in sent or k - 2 in sent


def test_no_other_file_names_a_mode() -> None:
    """Formats write the names and commands offer them; everything else asks the object."""
    root = Path(zbcompile.__file__).parent
    quoted = re.compile("|".join(f"[\"']{mode.name}[\"']" for mode in SEND_MODES))
    named = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if quoted.search(path.read_text(encoding="utf-8"))
    }
    assert named == {"schedule/semantics.py"}


def test_a_name_that_is_unknown_is_refused() -> None:
    assert [send_mode(name) for name in TRANSPORTS] == list(SEND_MODES)
    with pytest.raises(UsageError, match="unknown transport 'pigeon'"):
        send_mode("pigeon")
    profile = Profile.uniform(StageCost.simple(1, 1, 1), 2)
    with pytest.raises(UsageError, match="unknown transport"):
        Problem(profile, Placement.linear(2), 1, transport="pigeon")
    assert Problem.of(profile, transport=DRAINED.name).sends is DRAINED
    assert Problem.of(Profile(profile.stages, link=Link(3))).sends is ASYNC
