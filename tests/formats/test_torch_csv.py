"""torch's schedule CSV, judged by torch's own reader, validator and lowering."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from tests.support.strategies import greedy_order, placements
from zbcompile.compiler.lower import lower_order
from zbcompile.errors import FormatError, UsageError
from zbcompile.formats import torch_csv
from zbcompile.schedule.check import check
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.problem import Problem


def chain(placement: Placement, num_microbatches: int) -> Problem:
    profile = Profile.uniform(StageCost.simple(3, 3, 2), placement.num_stages)
    return Problem.of(profile, placement, num_microbatches)


def rows_of(text: str) -> dict[int, list[object]]:
    reader = csv.reader(io.StringIO(text))
    return {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(reader)}


@given(placements(), st.integers(1, 3), st.integers(0, 999), st.booleans())
def test_every_schedule_round_trips_and_torch_accepts_it(
    placement: Placement, count: int, seed: int, communication: bool
) -> None:
    problem = chain(placement, count)
    schedule = greedy_order(problem, Random(seed))
    if communication:
        schedule = insert_communication(schedule, problem)
    text = torch_csv.dumps(schedule)
    assert torch_csv.loads(text) == torch_csv.CsvSchedule(schedule)
    torch_schedules._validate_schedule(
        {r: [a for a in row if a.is_compute_op] for r, row in rows_of(text).items()},
        placement.num_ranks,
        placement.num_stages,
        count,
    )
    assert torch_csv.dumps(schedule, communication=False) == torch_csv.dumps(schedule.compute_only())


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_torchs_own_schedules_are_read_and_legal(name: str) -> None:
    ranks, count = 4, 8
    each = 1 if name == "GPipe" else 2
    placement = Placement.v(ranks, 2) if name == "ZBVZeroBubble" else Placement.looped(ranks, each)
    rows = TORCH_ORDERS[name](ranks, each, count)
    buffer = io.StringIO()
    csv.writer(buffer).writerows(rows[r] for r in range(ranks))
    found = torch_csv.loads(buffer.getvalue())
    assert found.schedule.placement == placement
    assert found.schedule.num_microbatches == count
    check(found.schedule, chain(placement, count))


def stages_on(ranks: int, each: int, rank: int, v: bool) -> list[object]:
    """Stand-ins with what torch's schedule classes read of a stage."""
    numbers = [rank, 2 * ranks - 1 - rank] if v else [rank + ranks * k for k in range(each)]
    return [
        type(
            "Stage",
            (),
            {
                "stage_index": s,
                "num_stages": ranks * each,
                "group_size": ranks,
                "group_rank": rank,
                "has_backward": True,
                "device": "cpu",
                "is_first": s == 0,
                "is_last": s == ranks * each - 1,
                "stage_index_to_group_rank": {},
                "submod": None,
            },
        )()
        for s in numbers
    ]


def multi(class_name: str) -> object:
    def build(ranks: int, each: int, count: int) -> dict[int, list[object]]:
        stages = stages_on(ranks, each, 0, class_name == "ScheduleZBVZeroBubble")
        schedule = getattr(torch_schedules, class_name)(stages, count, loss_fn=lambda *_: None)
        return schedule.pipeline_order

    return build


def single(class_name: str) -> object:
    def build(ranks: int, _: int, count: int) -> dict[int, list[object]]:
        stage = stages_on(ranks, 1, 0, False)[0]
        schedule = getattr(torch_schedules, class_name)(stage, count, loss_fn=lambda *_: None)
        return schedule._get_pipeline_order()

    return build


TORCH_ORDERS = {
    "GPipe": single("ScheduleGPipe"),
    "Interleaved1F1B": multi("ScheduleInterleaved1F1B"),
    "InterleavedZeroBubble": multi("ScheduleInterleavedZeroBubble"),
    "ZBVZeroBubble": multi("ScheduleZBVZeroBubble"),
}


def test_torchs_lowering_of_our_order_is_read_back_and_legal() -> None:
    """torch puts its own sends and receives into our order; its CSV with them is a legal schedule of ours."""
    placement, count = Placement.looped(2, 2), 4
    problem = chain(placement, count)
    schedule = greedy_order(problem, Random(3))
    lowered = torch_schedules._add_send_recv(
        rows_of(torch_csv.dumps(schedule)), lambda s: placement.rank_of[s], placement.num_stages
    )
    buffer = io.StringIO()
    csv.writer(buffer).writerows(lowered[r] for r in range(placement.num_ranks))
    found = torch_csv.loads(buffer.getvalue()).schedule
    assert found.compute_only() == schedule
    assert found.has_communication
    check(found, problem)


def test_sharding_is_read_once_per_stage_and_overlapped_pairs_in_order() -> None:
    text = "0UNSHARD,0F0,0RESHARD,0UNSHARD,(0F1;0B0)OVERLAP_F_B,,0B1,0REDUCE_GRAD,0RESHARD\r\n"
    found = torch_csv.loads(text)
    assert found.left_out == ("0RESHARD", "0UNSHARD")
    assert found.overlapped == 1
    assert str(found.schedule) == (
        "placement 0\nmicrobatches 2\nrank 0: 0UNSHARD 0F0 0F1 0BW0 0BW1 0REDUCE_GRAD 0RESHARD\n"
    )
    for word in ("0UNSHARD0", "0RESHARD1", "UNSHARD"):
        with pytest.raises(FormatError, match="not an action"):
            torch_csv.loads(f"{word},0F0,0B0\n")


def test_actions_of_whole_stages_make_the_round_trip_and_pass_torchs_validator() -> None:
    """torch's own actions, and its own pass that adds REDUCE_GRAD, agree with what lowering puts in."""
    placement, count = Placement.v(2), 3
    stage = replace(StageCost.simple(3, 3, 2), unshard_ns=4, reduce_ns=5)
    problem = Problem.of(Profile.uniform(stage, 4, 1), placement, count)
    rows = [[0, 3], [1, 2]]
    order = [
        [Action(Kind.FORWARD, s, i) for s in row for i in range(count)]
        + [Action(Kind.FULL_BACKWARD, s, i) for s in reversed(row) for i in range(count)]
        for row in rows
    ]
    schedule = lower_order(Schedule.of(placement, count, order), problem).schedule
    text = torch_csv.dumps(schedule)
    assert torch_csv.loads(text).schedule == schedule
    assert torch_csv.loads(text).left_out == ()
    actions: dict[int, Any] = rows_of(text)
    assert [[str(a) for a in row] for row in actions.values()] == list(csv.reader(io.StringIO(text)))
    found = torch_schedules._validate_schedule(actions, 2, 4, count)
    assert found == {0: 0, 3: 0, 1: 1, 2: 1}
    reduces = torch_schedules.REDUCE_GRAD
    for row in actions.values():
        mine = [str(a) for a in row if a.is_compute_op or a.computation_type is reduces]
        compute = [a for a in row if a.is_compute_op]
        assert mine == [str(a) for a in torch_schedules._add_reduce_grad(compute, count)]
    bare = torch_csv.dumps(schedule, communication=False)
    assert torch_csv.loads(bare).schedule == schedule.compute_only()


def test_letters_are_torchs() -> None:
    schedule = Schedule.parse(
        "placement 0 1\nmicrobatches 1\nrank 0: 0F0 0SF0>1 0RB0<1 0BW0\nrank 1: 1RF0<0 1F0 1B0 1SB0>0 1W0\n"
    )
    assert torch_csv.dumps(schedule) == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n"
    assert torch_csv.dumps(schedule, communication=False) == "0F0,0B0\n1F0,1I0,1W0\n"


def test_a_message_past_a_stage_cannot_be_exported() -> None:
    profile = Profile((StageCost.simple(3, 3, 2),) * 3, (Edge(0, 1), Edge(0, 2), Edge(1, 2)))
    problem = Problem.of(profile, num_microbatches=1)
    schedule = insert_communication(greedy_order(problem), problem)
    with pytest.raises(UsageError, match="not neighbours"):
        torch_csv.dumps(schedule)
    assert torch_csv.loads(torch_csv.dumps(schedule, communication=False)).schedule == schedule.compute_only()
