"""Actions of stages as a whole: where they stand, and the clock against constraints written out anew."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import greedy_order, step_problems
from zbcompile.compiler.lower import lower_order
from zbcompile.errors import CheckError, UsageError
from zbcompile.passes.lower.codegen import emit
from zbcompile.schedule.check import check, faults, is_well_formed
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.problem import TRANSPORTS, Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.stage_actions import with_stage_actions, with_those_of

_WEIGHTS = (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)
Constraint = tuple[str, str, int]
"""Before, after, and the least time from the start of the first to the start of the second, in ns."""


def brute_force(schedule: Schedule, problem: Problem) -> tuple[list[int], list[int], list[int]]:
    """Ends and spans of all ranks, and what of their ends reductions expose, from constraints by relaxation.

    Messages leave at once (``async``). Written from the rule alone, as a list of constraints between named
    events, and solved forward and backward until nothing changes.
    """
    costs, extra = problem.profile.stages, problem.profile.overhead_ns
    times = {
        Kind.FORWARD: [c.forward_ns + extra for c in costs],
        Kind.BACKWARD_INPUT: [c.backward_input_ns + extra for c in costs],
        Kind.BACKWARD_WEIGHT: [c.backward_weight_ns + extra for c in costs],
        Kind.FULL_BACKWARD: [c.full_backward_ns + extra for c in costs],
    }
    found: list[Constraint] = []
    length: dict[str, int] = {}
    names = {str(a) for _, _, a in schedule.actions()}
    tails: list[str] = []
    for rank, row in enumerate(schedule.order):
        for action in row:
            length[str(action)] = times[action.kind][action.stage]
        found += [(str(a), str(b), length[str(a)]) for a, b in zip(row, row[1:], strict=False)]
        stages = list(dict.fromkeys(a.stage for a in row if a.kind is Kind.FORWARD))
        queue = [(f"gather {s}", costs[s].unshard_ns) for s in stages if costs[s].unshard_ns]
        for s in stages:
            first = next(str(a) for a in row if a.kind is Kind.FORWARD and a.stage == s)
            if costs[s].unshard_ns:
                found.append((f"gather {s}", first, costs[s].unshard_ns))
        for k, action in enumerate(row):
            s = action.stage
            later = any(b.kind in _WEIGHTS and b.stage == s for b in row[k + 1 :])
            if action.kind in _WEIGHTS and not later and costs[s].reduce_ns:
                queue.append((f"reduce {s}", costs[s].reduce_ns))
                found.append((str(action), f"reduce {s}", length[str(action)]))
        length.update(queue)
        found += [(a, b, taken) for (a, taken), (b, _) in zip(queue, queue[1:], strict=False)]
        tail = f"update {rank}"
        tails.append(tail)
        length[tail] = sum(costs[s].update_ns for s in stages)
        found += [(name, tail, length[name]) for name in [str(row[-1]), *(name for name, _ in queue)]]
    for edge in problem.profile.edges:
        for i in range(problem.num_microbatches):
            there, back = problem.lag_ns(edge), problem.lag_ns(edge, backward=True)
            one = f"{edge.source}F{i}"
            found.append((one, f"{edge.target}F{i}", length[one] + there))
            made, used = (
                f"{s}BW{i}" if f"{s}BW{i}" in names else f"{s}B{i}" for s in (edge.target, edge.source)
            )
            if edge.has_gradient:
                found.append((made, used, length[made] + back))
    start = dict.fromkeys(length, 0)
    while any(start[b] < start[a] + gap for a, b, gap in found):
        for a, b, gap in found:
            start[b] = max(start[b], start[a] + gap)
    ends = [start[tail] + length[tail] for tail in tails]
    latest = {name: start[name] if name in tails else 1 << 60 for name in length}
    while any(latest[a] > latest[b] - gap for a, b, gap in found):
        for a, b, gap in found:
            latest[a] = min(latest[a], latest[b] - gap)
    spans, exposed = [], []
    for rank, row in enumerate(schedule.order):
        own = {f"gather {a.stage}" for a in row} & length.keys() | {str(row[0])}
        spans.append(ends[rank] - min(latest[name] for name in own))
        exposed.append(start[tails[rank]] - start[str(row[-1])] - length[str(row[-1])])
    return ends, spans, exposed


@given(step_problems(), st.integers(0, 999))
def test_the_clock_is_the_one_of_the_constraints(problem: Problem, seed: int) -> None:
    schedule = greedy_order(problem, Random(seed))
    ends, spans, exposed = brute_force(schedule, problem)
    timeline = simulate(schedule, problem)
    assert list(timeline.rank_end) == ends
    assert list(timeline.rank_span) == spans
    assert [timeline.exposed_ns(rank) for rank in range(problem.num_ranks)] == exposed
    assert timeline.value_ns == (max(spans) if problem.objective == "span" else max(ends))
    assert simulate(timeline.schedule, problem) == timeline
    check(timeline.schedule, problem)


@given(step_problems(), st.integers(0, 999), st.sampled_from(TRANSPORTS))
def test_lowering_puts_them_in_by_rule_and_every_send_mode_runs(
    problem: Problem, seed: int, transport: str
) -> None:
    """They cost no order its legality, in no send mode; a text says all."""
    problem = problem.with_(transport=transport)
    schedule = greedy_order(problem, Random(seed))
    if any("deadlock" in str(fault) for fault in faults(schedule, problem)):
        return
    comm = lower_order(schedule, problem)
    check(comm.schedule, problem)
    assert simulate(comm.schedule, problem).value_ns == comm.value_ns
    assert comm.schedule.compute_only() == schedule
    assert Schedule.parse(str(comm.schedule)) == comm.schedule
    for rank, row in enumerate(comm.schedule.order):
        gathered = [a.stage for a in row if a.kind is Kind.UNSHARD]
        assert [a.kind for a in row[: len(gathered)]] == [Kind.UNSHARD] * len(gathered)
        assert set(gathered) == {
            s for s in problem.placement.stages_of(rank) if problem.profile.stages[s].unshard_ns
        }


CHAIN = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 4, 1), Placement.v(2), 2, transport="async")


def test_stages_without_times_get_them_where_they_are_asked_for() -> None:
    order = greedy_order(CHAIN, Random(1), fuse=1.0)
    plain = lower_order(order, CHAIN)
    asked = lower_order(order, CHAIN, sharded_stages=[0, 1], reduced_stages=[0, 3])
    assert plain.value_ns == asked.value_ns == simulate(asked.schedule, CHAIN).value_ns
    rows = [[str(a) for a in row if a.kind.is_of_stage] for row in asked.schedule.order]
    assert rows == [["0UNSHARD", "3REDUCE_GRAD", "0REDUCE_GRAD", "0RESHARD"], ["1UNSHARD", "1RESHARD"]]
    with pytest.raises(UsageError, match="not there"):
        lower_order(order, CHAIN, reduced_stages=[4])


def test_programs_call_a_verb_per_action() -> None:
    order = greedy_order(CHAIN, Random(1), fuse=1.0)
    comm = lower_order(order, CHAIN, sharded_stages=[3], reduced_stages=[0])
    text = emit(comm.schedule, CHAIN, None, comm.send_slots)[0]
    lines = [line.strip() for line in text.splitlines()]
    calls = [line for line in lines if line.endswith(("unshard(3)", "reshard(3)", "reduce_grad(0)"))]
    assert calls == ["rank.unshard(3)", "rank.reshard(3)", "rank.reduce_grad(0)"]


def test_orders_keep_what_they_were_given() -> None:
    given = Schedule.parse(
        "placement 0\nmicrobatches 2\nrank 0: 0UNSHARD 0F0 0BW0 0F1 0BW1 0RESHARD 0REDUCE_GRAD\n"
    )
    problem = Problem.of(Profile((StageCost.simple(1, 1, 1),)), None, 2)
    check(given, problem)
    assert lower_order(given, problem, merge=True).schedule == given
    assert insert_communication(given, problem) == given
    assert with_stage_actions(given, problem, sharded_stages=[0], reduced_stages=[0]) is given
    assert with_those_of(given.compute_only(), given) == given


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0F0 0UNSHARD 0BW0", "0UNSHARD stands behind an F"),
        ("0F0 0REDUCE_GRAD 0BW0", "0REDUCE_GRAD stands before the last W"),
        ("0UNSHARD 0F0 0RESHARD 0BW0", "0RESHARD stands before the last W"),
        ("0F0 0BW0 0RESHARD", "0RESHARD has no 0UNSHARD"),
        ("0F0 0BW0 0REDUCE_GRAD 0REDUCE_GRAD", "appears twice"),
    ],
)
def test_the_judge_names_what_stands_wrong(row: str, words: str) -> None:
    schedule = Schedule.parse(f"placement 0\nmicrobatches 1\nrank 0: {row}\n")
    problem = Problem.of(Profile((StageCost.simple(1, 1, 1),)), None, 1)
    with pytest.raises(CheckError, match=words):
        check(schedule, problem)
    assert not is_well_formed(schedule, problem)


def test_an_action_of_a_stage_has_no_microbatch_and_no_peer() -> None:
    assert str(Action(Kind.REDUCE_GRAD, 2, 0)) == "2REDUCE_GRAD"
    assert Action.parse("2RESHARD") == Action(Kind.RESHARD, 2, 0)
    with pytest.raises(UsageError, match="takes no microbatch"):
        Action(Kind.UNSHARD, 0, 1)
    with pytest.raises(UsageError, match="takes no peer"):
        Action(Kind.UNSHARD, 0, 0, 1)


def test_a_reduction_that_later_work_hides_is_not_exposed() -> None:
    """Stage 1's reduction runs under stage 0's backwards; stage 0's is exposed, then comes the update."""
    costs = tuple(replace(StageCost.simple(2, 2, 2), reduce_ns=r, update_ns=1) for r in (5, 3))
    problem = Problem.of(Profile(costs), Placement((0, 0)), 1)
    timeline = simulate(Schedule.parse("placement 0 0\nmicrobatches 1\nrank 0: 0F0 1F0 1BW0 0BW0\n"), problem)
    assert timeline.compute_end == (12,)
    assert timeline.exposed_ns(0) == 5
    assert timeline.rank_end == (12 + 5 + 2,)
    rows = dict(zip(map(str, timeline.schedule.order[0]), timeline.start[0], strict=True))
    assert rows["1REDUCE_GRAD"] == 8
    assert rows["0REDUCE_GRAD"] == 12
