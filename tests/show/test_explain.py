"""The facts that `explain` tells are right when counted in another way, and certificates are doubted."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.support.places import EXAMPLES
from tests.support.planner_cases import random_problem
from tests.support.strategies import greedy_order, problems
from zbcompile.errors import CheckError, InfeasibleError, UsageError
from zbcompile.formats import schedule_json
from zbcompile.formats.measured_json import Measured
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.planner.bounds.analytic import analytic_bounds
from zbcompile.planner.certify.derive import derivations
from zbcompile.schedule.ir import Kind
from zbcompile.schedule.least_memory import check_caps
from zbcompile.schedule.memory import memory_peaks
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.semantics import SEND_MODES
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Certificate
from zbcompile.show.explain import Explanation, explained
from zbcompile.show.explain_json import explanation_json
from zbcompile.show.explain_words import explanation_text
from zbcompile.show.proof_words import proof_words

EXAMPLE = schedule_json.loads((EXAMPLES / "four-unequal-stages.schedule.json").read_text())


def drawn(found: Explanation, rank: int | None = None, width: int = 80) -> str:
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(explanation_text(found, rank))
    return capture.get()


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_every_bound_by_hand_is_put_into_words_and_added_up_again(objective: str) -> None:
    rng, seen = random.Random(5), set()
    for k in range(60):
        problem = random_problem(rng, ranks=2 + k % 2, microbatches=2 + k % 3).with_(objective=objective)
        schedule = greedy_order(problem, Random(1))
        problem = problem.with_(caps=tuple(memory_peaks(schedule, problem)))
        timeline = simulate(schedule, problem)
        for bound in analytic_bounds(problem):
            if bound.method in seen or bound.value_ns < 1:
                continue
            seen.add(bound.method)
            right = Certificate(objective, timeline.value_ns, bound.value_ns, bound.method, bound.witness)
            words = proof_words(ScheduleFile(schedule, problem, right), timeline)
            assert words is not None
            assert words.fault is None, bound.method
            assert words.sum_lines[-1] == f"= {bound.value_ns:,} ns"
            assert "?" not in words.reason
            if bound.value_ns < timeline.value_ns:
                wrong = replace(right, bound_ns=bound.value_ns + 1)
                words = proof_words(ScheduleFile(schedule, problem, wrong), timeline)
                assert words is not None
                assert words.fault is not None, bound.method
                assert "no order" not in words.claim
    assert seen >= set(derivations(objective)) - {"start_end_idle", "warmup"}, seen


def test_a_method_that_nobody_knows_or_a_foreign_value_proves_nothing() -> None:
    certificate, timeline = EXAMPLE.certificate, simulate(EXAMPLE.schedule, EXAMPLE.problem)
    assert certificate is not None
    other = replace(certificate, value_ns=certificate.value_ns + 1)
    words = proof_words(replace(EXAMPLE, certificate=other), timeline)
    assert words is not None
    assert "proves nothing" in words.claim
    assert words.fault is not None
    for method in ("crossing", "cp_sat", "variants", "blocking_send", "magic"):
        words = proof_words(replace(EXAMPLE, certificate=replace(certificate, method=method)), timeline)
        assert words is not None
        assert words.sum_lines == ()
    assert words.fault is not None


@settings(max_examples=40)
@given(problems(), st.integers(0, 999), st.sampled_from([mode.name for mode in SEND_MODES]))
def test_the_facts_of_ranks_are_those_of_the_order(problem: Problem, seed: int, transport: str) -> None:
    schedule = greedy_order(problem, Random(seed))
    problem = problem.with_(transport=transport)
    try:
        timeline = simulate(schedule, problem)
    except CheckError:
        return
    found = explained(ScheduleFile(schedule, problem), bubbles=2)
    assert found.timeline.value_ns == timeline.value_ns
    for facts, row in zip(found.ranks, schedule.order, strict=True):
        kinds = [action.kind for action in row]
        assert sum(facts.splits.split) == kinds.count(Kind.BACKWARD_WEIGHT)
        assert sum(facts.splits.fused) == kinds.count(Kind.FULL_BACKWARD)
        assert facts.peak.held_bytes == timeline.peak_bytes[facts.rank]
        stages = problem.profile.stages
        held = sum(stages[s].saved_bytes for s, _ in facts.peak.flying)
        held += sum(stages[s].saved_for_weight_bytes for s, _ in facts.peak.waiting)
        assert held + problem.static_bytes(facts.rank) <= facts.peak.held_bytes
        assert facts.span_ns >= facts.work_ns + facts.held_ns
        splits = facts.splits
        assert splits.filled_ns + splits.last_ns <= splits.weight_ns
    assert all(found.ranks[r].span_ns == timeline.span_ns for r in found.deciding)
    assert json.dumps(explanation_json(found))
    assert max(map(len, drawn(found).splitlines())) <= 80


@given(problems(max_ranks=3, max_microbatches=2))
@settings(max_examples=30)
def test_the_smallest_cap_works_and_a_byte_less_does_not(problem: Problem) -> None:
    found = explained(ScheduleFile(greedy_order(problem), problem), bubbles=0)
    assert found.least_caps is not None
    if found.least_cap_works:
        check_caps(problem.with_(caps=(max(found.least_caps),) * problem.num_ranks))
    for rank, least in enumerate(found.least_caps):
        caps = [None if r != rank else least - 1 for r in range(problem.num_ranks)]
        if least > problem.static_bytes(rank):
            with pytest.raises(InfeasibleError):
                check_caps(problem.with_(caps=tuple(caps)))


def test_the_example_is_explained() -> None:
    found = explained(EXAMPLE)
    assert found.deciding == (0,)
    assert found.tight == (0, 1, 2, 3)
    assert [sum(f.splits.split) for f in found.ranks] == [0, 7, 8, 8]
    assert found.ranks[2].splits.filled_ns == 140_000_000
    bubble = found.bubbles[0]
    assert (bubble.pause.rank, bubble.pause.start_ns, bubble.pause.end_ns) == (0, 108_000_000, 236_173_068)
    assert [(link.kind, link.rank) for link in bubble.chain] == [
        *[("made", r) for r in (1, 2, 3, 3, 2, 1, 0)],
        ("start", 0),
    ]
    second = found.bubbles[1]
    assert second.chain[-1].kind == "room"
    assert str(second.chain[-1].until) == "3W1"
    text = drawn(found)
    for words in (
        "rank 3 runs B0 right behind F0 F0 waits for an activation of rank 0",
        "OPTIMAL",
        "rank 0 decides the step",
        "root: rank 3 has no room under its cap for F6",
    ):
        assert words in text.replace("\n    ", " "), words


def test_questions_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="no such rank"):
        explained(EXAMPLE, rank=4)
    with pytest.raises(UsageError, match="does not run at this time"):
        explained(EXAMPLE, at=lambda whole: whole)
    with pytest.raises(UsageError, match="another plan"):
        explained(EXAMPLE, measured=Measured.of([[]]))


def test_an_order_without_costs_is_told_in_units() -> None:
    found = explained(ScheduleFile(EXAMPLE.schedule))
    text = drawn(found)
    assert "units" in text
    assert "GiB" not in text
    assert explanation_json(found)["least_cap_bytes"] is None
    assert "no costs" in drawn(found, 1)


@pytest.mark.parametrize(
    "witness",
    [
        {"of": "blocking_send"},
        {"of": "memory_windows", "idle_ns": 1, "windows": [["\x1b[2J"], [[]], {}, 3]},
        {"of": "work", "work_ns": 10**400, "rank": -(10**400)},
        {"of": ["work"], "idle_ns": "x"},
    ],
)
def test_a_hostile_witness_is_neither_believed_nor_printed(witness: dict[str, object]) -> None:
    assert EXAMPLE.certificate is not None
    for method in ("blocking_send", "memory_windows", "warmup", "last_round_trip", "variants", "crossing"):
        certificate = replace(EXAMPLE.certificate, method=method, witness=witness)
        text = drawn(explained(replace(EXAMPLE, certificate=certificate), bubbles=0))
        assert "\x1b" not in text
        assert "OPTIMAL" not in text or "So says the file" in text.replace("\n", " ")
