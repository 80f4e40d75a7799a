"""Orders of the literature replayed on the published profiles."""

from __future__ import annotations

from typing import Any

import pytest

from zbcompile.planner.core.instance import Instance, to_schedule
from zbcompile.planner.starts.classic import gpipe, one_f_one_b, zb_h1, zb_h2
from zbcompile.planner.starts.classic_loops import dual_pipe_v, interleaved, v_half, v_min, zb_v
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.memory import memory_peaks
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate

LINEAR = {"GPipe": gpipe, "1F1B": one_f_one_b, "ZB-H1": zb_h1, "ZB-H2": zb_h2}


def paper_problem(config: dict[str, Any], cap_in_ranks: float | None, objective: str = "span") -> Problem:
    """One row of arXiv 2401.10241, tables 5 and 6; the cap in multiples of p * M_B."""
    stage = StageCost.simple(
        config["forward_us"] * 1000,
        config["backward_input_us"] * 1000,
        config["backward_weight_us"] * 1000,
        config["saved_units"],
        config["saved_for_weight_units"],
    )
    ranks = config["num_ranks"]
    cap = None if cap_in_ranks is None else int(config["saved_units"] * ranks * cap_in_ranks)
    profile = Profile.uniform(stage, ranks, config["comm_us"] * 1000)
    return Problem.of(profile, None, config["num_microbatches"], cap, objective)


@pytest.mark.parametrize("row", range(6))
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-H2"])
def test_published_bubble_rates_to_four_digits(paper_profiles: dict[str, Any], row: int, name: str) -> None:
    config = paper_profiles["configs"][row]
    problem = paper_problem(config, None)
    codes = LINEAR[name](config["num_ranks"], config["num_microbatches"])
    timeline = simulate(to_schedule(codes, problem), problem)
    assert round(timeline.bubble("span"), 4) == config["published_bubble_rate"][name]


@pytest.mark.parametrize("name", sorted(LINEAR))
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 1), (4, 2), (4, 4), (4, 9), (8, 24)])
def test_every_order_is_legal(name: str, p: int, m: int) -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), p, 1), None, m)
    check(to_schedule(LINEAR[name](p, m), problem), problem)


@pytest.mark.parametrize(("name", "most"), [("1F1B", 8), ("ZB-H1", 8), ("ZB-H2", 15), ("GPipe", 24)])
def test_peak_memory_is_the_published_one(name: str, most: int) -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2, 10, 4), 8, 0), None, 24)
    assert max(memory_peaks(to_schedule(LINEAR[name](8, 24), problem), problem)) == 10 * most


def test_times_of_an_instance_carry_the_host_overhead() -> None:
    profile = Profile((StageCost.simple(3, 4, 5),), overhead_ns=2)
    instance = Instance.of(Problem.of(profile))
    assert (instance.forward, instance.backward, instance.weight, instance.fused) == ((5,), (6,), (7,), (11,))
    assert instance.relaxed().weight == (5,)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 3), (4, 8), (4, 16), (3, 6), (8, 16)])
def test_orders_of_torch_action_by_action(p: int, m: int) -> None:
    """ZBV, DualPipeV, InterleavedZeroBubble and Interleaved1F1B equal what torch's own classes build."""
    from types import SimpleNamespace

    from torch.distributed.pipelining import schedules as theirs

    kinds = {"FORWARD": 0, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 2, "FULL_BACKWARD": 3}

    def row(build: object, rank: int, **fields: object) -> list[tuple[int, int]]:
        owner = SimpleNamespace(pp_group_size=p, _n_microbatches=m, **fields)
        actions = [a for a in build._calculate_single_rank_operations(owner, rank) if a is not None]  # type: ignore[attr-defined]
        single = [x for a in actions for x in (a.sub_actions or (a,))]
        return [(kinds[x.computation_type.name], x.stage_index) for x in single]

    rounds = max(1, m // p)
    for rank in range(p):
        assert zb_v(p, m)[rank] == row(theirs.ScheduleZBVZeroBubble, rank, num_stages=2 * p)
        dual = dual_pipe_v(p, m)
        assert (dual is None) == (m < 2 * p)
        if dual is not None:
            assert dual[rank] == row(theirs.ScheduleDualPipeV, rank)
        for v in (2, 3):
            for zero_bubble in (True, False):
                ours = interleaved(p, v, m, zero_bubble=zero_bubble)
                assert ours is not None
                name = "ScheduleInterleavedZeroBubble" if zero_bubble else "ScheduleInterleaved1F1B"
                fields = {"n_local_stages": v, "microbatches_per_round": m // rounds}
                assert ours[rank] == row(getattr(theirs, name), rank, **fields)


def test_rounds_that_do_not_divide_have_no_interleaved_order() -> None:
    assert interleaved(4, 2, 9, zero_bubble=True) is None


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 7), (4, 8), (8, 24)])
def test_every_v_order_is_legal_at_its_published_memory(p: int, m: int) -> None:
    """ZB-V p, V-Half about p / 2 + 1, V-Min about p / 3 + 2, in units of a whole rank's M_B."""
    profile = Profile.uniform(StageCost.simple(2, 2, 2, 10, 5), 2 * p)
    problem = Problem.of(profile, Placement.v(p), m)
    instance = Instance.of(problem)
    for name, codes, most in (
        ("ZB-V", zb_v(p, m), p),
        ("V-Half", v_half(instance), p / 2 + 1.5),
        ("V-Min", v_min(instance), p / 3 + 2.5),
    ):
        schedule = to_schedule(codes, problem)
        check(schedule, problem)
        assert max(memory_peaks(schedule, problem)) <= 20 * most, name
