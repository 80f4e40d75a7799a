"""The rule for memory against a bag of tensors, and all who ask for it against each other."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_oracle import fits_by_hand, held_by_hand
from tests.support.planner_cases import random_placement, random_problem
from tests.support.strategies import greedy_order, problems
from zbcompile.planner.core.dispatch import ALTERNATE, Dispatcher, Recipe
from zbcompile.planner.core.instance import Instance, to_codes, to_schedule
from zbcompile.planner.core.kernel import stays_legal
from zbcompile.planner.core.score import fits
from zbcompile.planner.core.tables import Tables, pack
from zbcompile.planner.starts.fused_patterns import pattern_codes
from zbcompile.schedule.check import faults
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.memory import (
    Memory,
    Uses,
    in_a_row,
    memory_after,
    memory_during,
    memory_peaks,
    uses_of,
)
from zbcompile.schedule.one_microbatch import OneMicrobatch
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate


@given(problems(), st.randoms(use_true_random=False), st.booleans())
def test_every_action_holds_what_the_bag_holds(
    problem: Problem, random: random.Random, messages: bool
) -> None:
    """Orders of any kind: microbatches in any order, B and W of some and BW of others."""
    schedule = greedy_order(problem, random, random.random())
    if messages:
        schedule = insert_communication(schedule, problem)
    bags = [held_by_hand(problem, rank, row) for rank, row in enumerate(schedule.order)]
    for rank, bag in enumerate(bags):
        assert list(memory_during(schedule, problem, rank)) == [most for most, _ in bag]
        assert memory_after(schedule, problem, rank) == [after for _, after in bag]
    assert memory_peaks(schedule, problem) == [max(most for most, _ in bag) for bag in bags]
    assert simulate(schedule, problem).peak_bytes == tuple(memory_peaks(schedule, problem))


@given(problems(), st.randoms(use_true_random=False), st.integers(-2, 2))
def test_judge_scorer_and_kernel_refuse_the_same_orders(
    problem: Problem, random: random.Random, spare: int
) -> None:
    """Of orders as the planner numbers them: it keeps the microbatches' order of each kind and stage."""
    codes = to_codes(greedy_order(problem, random, random.random()))
    schedule = to_schedule(codes, problem)
    peaks = [
        max(most for most, _ in held_by_hand(problem, rank, row)) for rank, row in enumerate(schedule.order)
    ]
    problem = problem.with_(caps=tuple(max(0, peak + spare) for peak in peaks))
    good = [fits_by_hand(problem, rank, row) for rank, row in enumerate(schedule.order)]
    assert (faults(schedule, problem) == []) == all(good)
    instance = Instance.of(problem)
    assert fits(instance, codes) == all(good)
    tables = Tables.of(instance)
    line = pack(instance, codes)
    assert [bool(stays_legal(tables, *line, r)) for r in range(problem.num_ranks)] == good


@given(problems(max_microbatches=1), st.randoms(use_true_random=False), st.booleans())
def test_steps_of_one_microbatch_hold_what_the_bag_holds(
    problem: Problem, random: random.Random, fusing: bool
) -> None:
    one, fuse = OneMicrobatch.of(problem, fusing=fusing), float(fusing)
    order = [*range(2 * problem.num_stages)]
    random.shuffle(order)
    order.sort(key=lambda step: step // problem.num_stages)
    rows: list[list[Action]] = [[] for _ in range(problem.num_ranks)]
    split = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    for step in order:
        backward, s = divmod(step, problem.num_stages)
        kinds = ((Kind.FULL_BACKWARD,) if fuse else split) if backward else (Kind.FORWARD,)
        rows[problem.placement.rank_of[s]] += [Action(kind, s, 0) for kind in kinds]
    peaks = [max(most for most, _ in held_by_hand(problem, r, row)) for r, row in enumerate(rows)]
    found = one.peaks([(step >= problem.num_stages, step % problem.num_stages) for step in order])
    assert [most + problem.static_bytes(r) for r, most in enumerate(found)] == peaks


def test_makers_of_orders_stay_within_the_bag() -> None:
    """List schedules and whole patterns, where a cap binds."""
    rng, tight = random.Random(5), 0
    for _ in range(60):
        ranks = rng.randint(1, 3)
        problem = random_problem(rng, ranks=ranks, microbatches=rng.randint(2, 5))
        instance, m = Instance.of(problem), problem.num_microbatches
        heads = tuple(rng.randint(0, m) for _ in range(ranks))
        orders = [pattern_codes(instance, ((m,) * ranks, (m,) * ranks, heads, (0,) * ranks))]
        keys = list(range(m)) * (3 * ranks)
        recipe = Recipe(ALTERNATE, on_rank=(m,) * ranks, idle=(0,) * ranks)
        listed = Dispatcher(instance, list).run(keys, recipe)
        orders += [] if listed is None else [listed]
        for codes in orders:
            schedule = to_schedule(codes, problem)
            for rank, row in enumerate(schedule.order):
                assert fits_by_hand(problem, rank, row)
                most = max(most for most, _ in held_by_hand(problem, rank, row))
                stage = problem.profile.stages[problem.placement.stages_of(rank)[0]]
                tight += most + stage.saved_bytes > (problem.caps[rank] or 0)
    assert tight > 40


def test_what_one_stage_needs() -> None:
    """Alone, with W's bytes beside B's, and how many microbatches of it fit."""
    wide, narrow = Uses.of_bytes(3, 5), Uses.of_bytes(5, 3)
    assert [uses.alone(fusing=fusing) for uses in (wide, narrow) for fusing in (True, False)] == [3, 5, 5, 5]
    assert [uses.split_holds_more for uses in (wide, narrow)] == [True, False]
    assert wide.all_taken == narrow.all_taken == 8
    assert [wide.most_in_flight(headroom, 4) for headroom in (-1, 0, 2, 3, 11, 12, 99)] == [
        0,
        0,
        0,
        1,
        3,
        4,
        4,
    ]
    assert Uses.of_bytes(0, 2).most_in_flight(0, 4) == 4


@given(st.integers(0, 9), st.integers(0, 9))
def test_relaxed_bytes_let_nothing_fit_less(saved: int, pending: int) -> None:
    """Splitting a BW holds no more, and F, B, W hold no more than before at any time."""
    memory = Memory.of_bytes([saved], [pending])
    before, relaxed = memory.uses[0], memory.relaxed().uses[0]
    assert not relaxed.split_holds_more
    assert in_a_row(relaxed.backward_input, relaxed.backward_weight) == in_a_row(before.full_backward)
    for end in (1, 2, 3):
        (held, most), (held_before, most_before) = (in_a_row(*uses[:end]) for uses in (relaxed, before))
        assert held <= held_before
        assert most <= most_before


def test_of_several_stages_per_rank_the_peak_is_the_sum() -> None:
    rng = random.Random(9)
    for _ in range(30):
        placement = random_placement(rng, 2)
        problem = random_problem(rng, ranks=2, microbatches=2, placement=placement)
        row = [Action(Kind.FORWARD, s, i) for s in placement.stages_of(0) for i in range(2)]
        schedule = Schedule.of(placement, 2, [row, []])
        forward = sum(uses_of(problem.profile.stages[s]).forward.peak for s in placement.stages_of(0))
        assert memory_peaks(schedule, problem)[0] - problem.static_bytes(0) == 2 * forward
