"""torch's pipeline runtime: our orders run there, its orders run here, and its mixed-up messages are
found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from tests.support import torch_workers
from tests.support.hand_stages import hand_autograd, hand_problem, hand_reference
from zbcompile.compiler.lower import lower_order
from zbcompile.formats import torch_csv
from zbcompile.passes.lower.codegen import emit
from zbcompile.passes.lower.insert_comm import insert_comm, keep_comm
from zbcompile.planner.plan import plan
from zbcompile.runtime.launch import spawn
from zbcompile.schedule.check import check, faults
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.problem import Problem

pytestmark = pytest.mark.timeout(300)
RANKS, COUNT = 2, 4


def torch_text(name: str, ranks: int, count: int, **how: Any) -> str:
    """A schedule of torch as its CSV."""
    rows = get_schedule_ops(name, ranks, count, **how)
    return "".join(",".join("" if a is None else str(a) for a in row) + "\n" for row in rows)


def unit_problem(schedule: Schedule) -> Problem:
    return hand_problem(schedule.placement, schedule.num_stages, schedule.num_microbatches, skip=False)


@pytest.mark.parametrize(
    ("name", "ranks", "count", "right"),
    [
        ("ZBVZeroBubble", 2, 4, False),
        ("InterleavedZeroBubble", 2, 4, False),
        ("DualPipeV", 4, 16, False),
        ("ZBVZeroBubble", 4, 16, False),
        ("Interleaved1F1B", 2, 4, True),
        ("Interleaved1F1B", 4, 8, True),
    ],
)
def test_deferred_receives_of_torch_are_judged(name: str, ranks: int, count: int, right: bool) -> None:
    text = torch_text(name, ranks, count, with_comms=True, defer_pp_recv=True)
    schedule = torch_csv.loads(text).schedule
    found = faults(schedule, unit_problem(schedule))
    assert (found == []) == right, found
    if not right:
        assert "mixed up" in str(found[0])


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "LoopedBFS"]
)
def test_orders_of_torch_without_deferring_are_accepted_with_and_without_messages(name: str) -> None:
    for with_comms in (False, True):
        schedule = torch_csv.loads(torch_text(name, 4, 8, with_comms=with_comms)).schedule
        check(schedule, unit_problem(schedule))


@pytest.mark.parametrize(("count", "tied", "skip"), [(2, False, False), (4, False, True), (5, True, True)])
def test_the_hand_made_stages_are_right(count: int, tied: bool, skip: bool) -> None:
    found, wanted = (f(count, COUNT, tied, skip) for f in (hand_reference, hand_autograd))
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)


def expected(count: int) -> dict[str, torch.Tensor]:
    return hand_reference(count, COUNT, skip=False)


def test_orders_go_both_ways_with_the_same_gradients() -> None:
    """Planned orders count microbatches in order: torch's runtime takes the k-th loss to be microbatch
    k's."""
    cases: list[tuple[str, Any]] = []
    counts = []
    for placement in (Placement.linear(2), Placement.v(2), Placement.looped(2)):
        problem = hand_problem(placement, placement.num_stages, COUNT, skip=False)
        order = plan(problem, time_limit_s=1.0).schedule
        lowered = insert_comm(order, problem).schedule
        cases.append(
            ("torch", (torch_csv.dumps(order, communication=False), "compute_only", placement.rank_of, COUNT))
        )
        cases.append(("torch", (torch_csv.dumps(lowered), "compute_comms", placement.rank_of, COUNT)))
        counts += [placement.num_stages] * 2
    for name in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        for with_comms in (False, True):
            text = torch_text(name, RANKS, COUNT, with_comms=with_comms)
            schedule = torch_csv.loads(text).schedule
            problem = unit_problem(schedule)
            lowered_ = (keep_comm if schedule.has_communication else insert_comm)(schedule, problem)
            texts = emit(lowered_.schedule, problem, None, lowered_.send_slots)
            cases.append(("ours", (text, texts)))
            counts.append(schedule.num_stages)
    found = spawn(torch_workers.both_ways, RANKS, (cases,), timeout_s=250)
    for k, (kind, _) in enumerate(cases):
        wanted = expected(counts[k])
        grads = {name: grad for rank in found for name, grad in rank[k].items()}
        assert grads.keys() == wanted.keys()
        for name, grad in wanted.items():
            if kind == "ours":
                assert torch.equal(grads[name], grad), (k, name)
            else:
                torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-6, msg=f"{k} {name}")


def test_actions_of_whole_stages_run_in_torchs_runtime_on_sharded_replicas() -> None:
    """UNSHARD, RESHARD and REDUCE_GRAD of a plan, 2 x 2 processes: the mean of both replicas' gradients."""
    placement = Placement.looped(2)
    problem = hand_problem(placement, placement.num_stages, COUNT, skip=False)
    whole = tuple(replace(stage, unshard_ns=300, reduce_ns=400) for stage in problem.profile.stages)
    problem = problem.with_(profile=replace(problem.profile, stages=whole))
    lowered = lower_order(plan(problem, level=1).schedule, problem).schedule
    text = torch_csv.dumps(lowered)
    for word in ("UNSHARD", "RESHARD", "REDUCE_GRAD"):
        assert all(f"{stage}{word}" in text for stage in range(4))
    arguments = (text, placement.rank_of, COUNT)
    found = spawn(torch_workers.sharded_in_torch, 4, arguments, timeout_s=250)
    wanted = hand_reference(4, 2 * COUNT, skip=False)
    assert set(found[0]) | set(found[2]) == set(wanted)
    for grads in found:
        for name, grad in grads.items():
            torch.testing.assert_close(2 * grad, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
