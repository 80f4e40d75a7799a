"""Cuts chosen with the order: the bound against brute force over cuts and orders, the choice, the targets."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from functools import partial

import pytest

from tests.support.places import DATA
from tests.support.planner_cases import brute_force, exact_value
from zbcompile.errors import FormatError, InfeasibleError, UsageError
from zbcompile.formats import schedule_json
from zbcompile.planner.bounds.cuts import Segments, best_cut, shared_bound
from zbcompile.planner.certify.certificate import explain, verify, verify_certificate
from zbcompile.planner.cuts import plan_cuts, quick_cuts
from zbcompile.planner.incumbent import Progress
from zbcompile.planner.plan import quick_value
from zbcompile.planner.run import Options
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.cuts import CutProblem, Cuts
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.least_memory import check_caps
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.speeds import AS_PROFILED, speeds_of

CUT = json.loads((DATA / "targets.json").read_text())["cut"]


def random_task(rng: random.Random, *, fusing: bool = False, several: bool = False) -> CutProblem:
    """Unequal pieces, links that size costs, caps that bind, ranks of different speed, odd edges at times."""
    ranks = 2 if several else rng.choice((2, 2, 3))
    placement = rng.choice((Placement.v(2), Placement.looped(2))) if several else Placement.linear(ranks)
    count = placement.num_stages + rng.randint(1, 2)
    pieces = []
    for _ in range(count):
        b, w, saved = rng.randint(1, 6), rng.randint(0, 5), rng.randint(1, 4)
        fused = rng.randint(max(0, b - 1), b + w) if fusing else b + w
        pieces.append(
            StageCost(rng.randint(1, 6), b, w, fused, saved, rng.randint(0, saved), rng.randint(0, 2))
        )
    edges = [
        Edge(k, k + 1, rng.randint(0, 3), rng.randint(0, 3), rng.random() > 0.05) for k in range(count - 1)
    ]
    if rng.random() < 0.2:
        edges.append(Edge(0, count - 1, rng.randint(0, 3), rng.randint(0, 3)))
    link = Link(rng.randint(0, 2), rng.choice((0, 10**9)))
    profile = Profile(tuple(pieces), tuple(edges), link, overhead_ns=rng.randint(0, 1))
    caps = tuple(
        None if rng.random() < 0.2 else rng.randint(6, 10 if ranks == 3 else 16) for _ in range(ranks)
    )
    speeds = speeds_of([rng.choice((1, 0.5, 0.7, 2)) for _ in range(ranks)]) if rng.random() < 0.4 else ()
    m = 1 if several or (fusing and ranks == 3) else rng.randint(1, 2 if fusing else 4 - (ranks == 3))
    return CutProblem.of(profile, placement, m, caps, rng.choice(("span", "makespan")), speeds=speeds)


def all_cuts(task: CutProblem) -> list[tuple[int, ...]]:
    """Every cut whose caps can be met."""
    count, stages = task.pieces.num_stages, task.frame.num_stages
    found = []
    for ends in itertools.combinations(range(1, count), stages - 1):
        sizes = tuple(b - a for a, b in itertools.pairwise((0, *ends, count)))
        try:
            check_caps(task.problem(sizes))
        except InfeasibleError:
            continue
        found.append(sizes)
    return found


@pytest.mark.parametrize(("fusing", "several"), [(False, False), (True, False), (False, True)])
def test_the_bound_holds_for_all_orders_of_all_cuts(fusing: bool, several: bool) -> None:
    rng = random.Random(5)
    solve = partial(brute_force, fusing=True) if fusing else exact_value
    judged = tight = 0
    for _ in range(25):
        task = random_task(rng, fusing=fusing, several=several)
        open_ones = all_cuts(task)
        found = best_cut(task) if not several else None
        if not open_ones:
            assert several or found is None
            continue
        bound = shared_bound(task) if several else found.bound
        least = min(solve(task.problem(sizes)) for sizes in open_ones)
        assert bound.value_ns <= least, task
        assert bound.value_ns >= least / 3
        judged, tight = judged + 1, tight + (bound.value_ns == least)
    assert judged >= 12
    assert several or tight >= 3


def test_the_loop_finds_the_best_order_of_all_cuts_and_its_certificate_is_derived_again() -> None:
    rng = random.Random(7)
    judged = 0
    for _ in range(5):
        task = random_task(rng)
        open_ones = all_cuts(task)
        if not open_ones:
            with pytest.raises(InfeasibleError, match="no cut fits"):
                plan_cuts(task, level=1)
            continue
        solution = plan_cuts(task, level=1, time_limit_s=1, fuse="never")
        check(solution.schedule, solution.problem)
        assert solution.problem == task.problem(solution.cuts.sizes)
        assert solution.certificate.value_ns == simulate(solution.schedule, solution.problem).value_ns
        if task.frame.num_microbatches < 3:
            assert solution.certificate.value_ns == min(brute_force(task.problem(s)) for s in open_ones)
        assert solution.certificate.method == "cuts"
        assert verify(solution) == []
        text = schedule_json.dumps(solution)
        assert schedule_json.loads(text).solution() == solution
        assert "cut" in explain(solution)
        judged += 1
    assert judged >= 2


def test_gradients_that_are_kept_count_in_the_bound_over_all_cuts() -> None:
    raised = 0
    for seed in range(40):
        rng = random.Random(seed)
        task = random_task(rng)
        stages = tuple(replace(piece, gradient_bytes=rng.randint(0, 2)) for piece in task.pieces.stages)
        frame, pieces = task.frame, replace(task.pieces, stages=stages)
        caps = tuple(None if cap is None else cap + rng.randint(0, 2) for cap in frame.caps)
        free, kept = (
            CutProblem.of(
                pieces,
                frame.placement,
                frame.num_microbatches,
                caps,
                frame.objective,
                speeds=task.speeds,
                kept_gradients=given,
            )
            for given in (False, True)
        )
        cuts = all_cuts(kept)
        if not cuts:
            continue
        lower, higher = best_cut(free), best_cut(kept)
        assert lower is not None
        assert higher is not None
        raised += lower.bound.value_ns < higher.bound.value_ns
        assert min(exact_value(kept.problem(sizes)) for sizes in cuts) >= higher.bound.value_ns
        solution = plan_cuts(kept, level=1)
        assert solution.problem.kept_gradients
        assert verify(solution) == []
    assert raised >= 2


def test_a_forged_certificate_is_refused() -> None:
    layer = StageCost.simple(4, 4, 2, 5, 2)
    task = CutProblem.of(Profile((layer,) * 9), Placement.linear(3), 6, 40)
    solution = plan_cuts(task, level=1)
    certificate, cuts = solution.certificate, solution.cuts
    assert verify(solution) == []
    higher = replace(certificate, bound_ns=certificate.bound_ns + 1, value_ns=certificate.value_ns + 1)
    forged = [
        replace(solution, certificate=replace(higher, value_ns=max(higher.bound_ns, certificate.value_ns))),
        replace(solution, cuts=None),
        replace(solution, cuts=replace(cuts, speeds=(AS_PROFILED, AS_PROFILED, 2 * AS_PROFILED))),
        replace(solution, cuts=replace(cuts, sizes=(1, 1, 7))),
        replace(
            solution, certificate=replace(certificate, witness={**certificate.witness, "sizes": [2, 2, 5]})
        ),
        replace(solution, certificate=replace(certificate, witness={**certificate.witness, "other": 1})),
        replace(solution, certificate=replace(certificate, method="work", witness={"rank": 0})),
    ]
    for wrong in forged:
        assert verify(wrong), wrong


def test_a_file_whose_cuts_do_not_make_its_profile_is_refused() -> None:
    layer = StageCost.simple(4, 4, 2, 5, 2)
    solution = plan_cuts(CutProblem.of(Profile((layer,) * 4), Placement.linear(2), 3), level=1)
    document = json.loads(schedule_json.dumps(solution))
    for change in (
        {"sizes": [1, 3]},
        {"sizes": [4]},
        {"sizes": [2, 0]},
        {"speeds": [1]},
        {"speeds": [1, -1]},
    ):
        with pytest.raises(FormatError):
            schedule_json.loads(json.dumps(document | {"cuts": document["cuts"] | change}))


def target_task(caps_in_p: float) -> CutProblem:
    """The problem ``cut`` of targets.json: 32 equal layers and a head on 8 ranks."""
    times, held = CUT["layer_ns"], CUT["layer_bytes"]
    share = CUT["head"]["times_layer"]
    layer = StageCost.simple(times["F"], times["B"], times["W"], held["saved"], held["saved_for_weight"])
    head = StageCost.simple(*(round(share * times[kind]) for kind in "FBW"), CUT["head"]["extra_saved"], 0)
    pieces = Profile((layer,) * 32 + (head,), link=Link(CUT["link_latency_ns"]))
    return CutProblem.of(pieces, Placement.linear(8), 16, int(caps_in_p * 8 * 4 * held["saved"]), "makespan")


def test_the_target_at_one_and_a_half_p_is_proved_over_all_cuts() -> None:
    solution = plan_cuts(target_task(1.5), level=1, time_limit_s=60, fuse="never")
    assert solution.certificate.is_optimal
    assert (
        solution.certificate.value_ns
        <= 1_000_000 * CUT["makespan_ms"]["climbed, 25 s of cuts with plans of .6 s"][3]
    )
    assert verify_certificate(solution).derived_ns == solution.certificate.bound_ns


@pytest.mark.parametrize(("caps_in_p", "least_ns"), [(0.5, 1_280_010_000), (1, 1_010_000_000)])
def test_the_bound_over_cuts_of_the_target(caps_in_p: float, least_ns: int) -> None:
    """At .5p memory alone keeps the ranks idle for a fifth of the step."""
    found = best_cut(target_task(caps_in_p))
    assert found is not None
    assert found.bound.value_ns >= least_ns


def test_what_a_step_costs_beside_its_pieces_is_in_the_bound_over_all_cuts() -> None:
    """Rank 0 pays it for its three pieces; ranks behind it count at least what piece 0 costs."""
    layer = StageCost.simple(4, 4, 2, 5, 2)
    whole = replace(layer, unshard_ns=3, reduce_ns=20, update_ns=5)
    for objective in ("span", "makespan"):
        plain, more = (
            Segments(CutProblem.of(Profile((piece,) * 9), Placement.linear(3), 6, 40, objective))
            for piece in (layer, whole)
        )
        assert more.cost((0, 0, 3)) == plain.cost((0, 0, 3)) + 3 * 28
        assert more.cost((2, 8, 9)) >= plain.cost((2, 8, 9)) + 28
    task = CutProblem.of(Profile((whole,) * 9), Placement.linear(3), 6, 40)
    assert verify(plan_cuts(task, level=1, time_limit_s=1)) == []
    several = CutProblem.of(Profile((whole,) * 9), Placement.v(2), 6)
    found = plan_cuts(several, level=1, time_limit_s=1)
    assert found.certificate.bound_ns == (6 * 90 + 9 * 5) // 2 + 3 + 20
    assert verify(found) == []


def test_the_headroom_of_all_ranks_bounds_several_stages_on_each() -> None:
    """One microbatch at a time fits: pieces hold 5 bytes for 8 ns and for all that comes behind them."""
    layer = StageCost.simple(4, 4, 0, 5, 0)
    task = CutProblem.of(Profile((layer,) * 8), Placement.v(2), 6, 20)
    bound = shared_bound(task)
    assert bound.value_ns == bound.witness["mean_area_ns"] == 6 * 5 * 8 * (8 * 9 // 2) // 40
    assert bound.value_ns < shared_bound(replace(task, frame=task.frame.with_(caps=(15, 20)))).value_ns
    assert bound.value_ns > shared_bound(replace(task, frame=task.frame.with_(caps=(20, None)))).value_ns
    solution = plan_cuts(task, level=1, time_limit_s=1)
    assert solution.certificate.bound_ns == bound.value_ns
    assert verify(solution) == []
    higher = replace(
        solution.certificate,
        bound_ns=bound.value_ns + 1,
        witness={**bound.witness, "mean_area_ns": bound.value_ns + 1},
    )
    assert verify(replace(solution, certificate=higher))


def test_a_cut_that_fits_is_found_where_the_balanced_one_does_not() -> None:
    """Rank 0 is the faster one and has bytes for one piece."""
    layer = StageCost(5, 3, 6, 6, 5, 5)
    placement, speeds = Placement((1, 1, 0, 1)), speeds_of((2, 0.5))
    task = CutProblem.of(Profile((layer,) * 6), placement, 1, (8, 27), speeds=speeds)
    solution = plan_cuts(task, level=1, time_limit_s=1)
    assert solution.cuts.sizes[2] == 1
    assert verify(solution) == []


def test_quick_cuts_are_the_same_wherever_they_are_asked_for_and_beat_the_even_cut() -> None:
    task = target_task(1)
    sizes = quick_cuts(task, tries=8)
    assert sizes == quick_cuts(task, tries=8)
    assert best_cut(task).bound.value_ns <= plan_value(task, sizes) < plan_value(task, (4,) * 7 + (5,))


def plan_value(task: CutProblem, sizes: tuple[int, ...]) -> int:
    """Value of the first orders of a cut."""
    value = quick_value(task.problem(sizes), Options())
    assert value is not None
    return value


def test_a_slow_rank_gets_fewer_pieces() -> None:
    layer = StageCost.simple(4, 4, 2, 5, 2)
    speeds = speeds_of((1, 1, 0.5, 1))
    task = CutProblem.of(Profile((layer,) * 28), Placement.linear(4), 8, speeds=speeds)
    solution = plan_cuts(task, level=1)
    assert solution.cuts.sizes[2] * 2 <= 1 + min(solution.cuts.sizes[r] for r in (0, 1, 3))
    assert verify(solution) == []
    alike = plan_cuts(CutProblem.of(task.pieces, task.frame.placement, 8), level=1).cuts.sizes
    assert solution.certificate.value_ns < plan_value(task, alike)


def test_what_cannot_be_meant_is_refused() -> None:
    layer = StageCost.simple(4, 4, 2, 5, 2)
    three = Profile((layer,) * 3)
    with pytest.raises(UsageError, match="3 pieces cannot be cut into 4 stages"):
        CutProblem.of(three, Placement.linear(4))
    with pytest.raises(UsageError, match="one speed per rank"):
        CutProblem.of(three, Placement.linear(2), speeds=(1, 2, 3))
    with pytest.raises(UsageError, match="add up"):
        Cuts(three, (1, 1))
    with pytest.raises(UsageError, match="variants"):
        Cuts(Profile((replace(layer, variants=(layer,)),) * 2), (1, 1))
    with pytest.raises(InfeasibleError, match="no cut fits") as caught:
        plan_cuts(CutProblem.of(Profile((layer,) * 6), Placement.linear(2), 2, 12))
    assert caught.value.needed == 15


def test_an_interrupt_keeps_the_best_cut() -> None:
    def stop(progress: Progress) -> None:
        if progress.best_ns is not None and not progress.interrupted:
            raise KeyboardInterrupt

    solution = plan_cuts(target_task(0.75), observer=stop, fuse="never")
    check(solution.schedule, solution.problem)
    assert solution.cuts is not None
