"""Folding: the periodic middle taken out, annealed around, and put back."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, islice

import pytest

from tests.support.planner_cases import peer_problem, score, v_problem
from zbcompile.planner.core.dispatch import Dispatcher
from zbcompile.planner.core.instance import Instance, W, to_schedule
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.improve.fold import Folded, fold
from zbcompile.planner.plan import plan
from zbcompile.planner.starts import classic
from zbcompile.planner.starts.list_settings import in_order_settings, round_settings
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem


def folded_classic(name: str, p: int, m: int, latency: int = 754) -> tuple[Instance, Folded]:
    problem = v_problem(p, m, p * 34 * 3, latency)
    instance = Instance.of(problem)
    codes = dict(classic.orders_for(problem))[name]
    folded = fold(instance, codes, Scorer(instance))
    assert folded is not None
    assert folded.unfold() == codes
    return instance, folded


@pytest.mark.parametrize("name", ["ZB-V", "V-Half", "V-Min", "DualPipeV"])
@pytest.mark.parametrize("m", [23, 48])
def test_the_middle_comes_back_as_it_was(name: str, m: int) -> None:
    """Folded and unfolded: the same order. Grown: the idle time of the folded one."""
    instance, folded = folded_classic(name, 8, m)
    assert folded.instance.num_microbatches <= 16
    assert folded.grown(m) == folded.unfold()
    again = folded.grown(60)
    long = replace(instance, num_microbatches=60)
    if name != "V-Min":  # whose middle idles
        block = instance.work(0) // m
        short = score(folded.instance, folded.codes)
        assert score(long, again) == short + (60 - folded.instance.num_microbatches) * block


def test_fused_backwards_on_unequal_ranks() -> None:
    """DualPipeV where the ranks' stages differ: one block of every rank stays, and what is gained is gained
    for any number of microbatches."""
    slow = StageCost(13, 13, 8, 20, 30, 13)
    fast = StageCost(8, 9, 6, 14, 27, 12)
    stages = (fast, slow, slow, fast, fast, slow, slow, slow)
    problem = Problem.of(Profile(stages), Placement.v(4), 40, 4 * 30 * 3, "span")
    instance = Instance.of(problem)
    codes = dict(classic.orders_for(problem))["DualPipeV"]
    folded = fold(instance, codes, Scorer(instance))
    assert folded is not None
    assert folded.unfold() == codes
    short = folded.instance.num_microbatches
    assert short < 20
    found = Annealer(folded.instance).run(
        folded.codes, 3000, seed=1, heat=4e-4, frozen_blocks=folded.frozen_blocks
    )
    gained = score(folded.instance, folded.codes) - score(folded.instance, found)
    assert gained > 0
    assert score(instance, codes) - score(instance, replace(folded, codes=found).unfold()) == gained


def test_blocks_that_do_not_fill_the_difference_are_not_grown() -> None:
    _, folded = folded_classic("V-Half", 4, 24)
    low, high, copies = folded.frozen_blocks[0]  # type: ignore[index]
    double = replace(folded, frozen_blocks=[(low, 2 * high - low, copies)] * 4)
    count = folded.instance.num_microbatches
    assert double.grown(count + 3) is None
    assert double.grown(count - 2) is None
    assert double.grown(count + 4) is not None


def test_annealing_leaves_the_block_alone() -> None:
    """V-Half, whose middle has no idle time: every rank's block stays, and what is gained is gained for
    any number of microbatches."""
    instance, folded = folded_classic("V-Half", 8, 40)
    found = Annealer(folded.instance).run(
        folded.codes, 4000, seed=1, heat=4e-4, frozen_blocks=folded.frozen_blocks
    )
    gained = score(folded.instance, folded.codes) - score(folded.instance, found)
    assert gained > 0
    for before, after, (low, high, copies) in zip(
        folded.codes, found, folded.frozen_blocks or [], strict=True
    ):
        assert copies == 1
        assert before[low:high] == after[low:high]
    assert score(instance, folded.unfold()) - score(instance, replace(folded, codes=found).unfold()) == gained


def test_copies_are_changed_alike() -> None:
    """V-Min's middle idles on a slow link: annealed in several copies at once, whole blocks stay whole."""
    instance, folded = folded_classic("V-Min", 8, 64, latency=9000)
    found = Annealer(folded.instance).run(
        folded.codes, 6000, seed=1, heat=4e-4, frozen_blocks=folded.frozen_blocks
    )
    changed = False
    for before, after, (low, high, copies) in zip(
        folded.codes, found, folded.frozen_blocks or [], strict=True
    ):
        size = high - low
        assert copies > 1
        blocks = [after[low + k * size : low + (k + 1) * size] for k in range(copies)]
        assert all(block == blocks[0] for block in blocks)
        assert sorted(blocks[0]) == sorted(before[low:high])
        changed = changed or blocks[0] != before[low:high]
    assert changed
    whole = replace(folded, codes=found).unfold()
    assert score(instance, whole) < score(instance, folded.unfold())
    problem = v_problem(8, 64, 8 * 34 * 2, latency=9000)
    check(to_schedule(whole, problem), problem)


def test_no_middle_no_fold() -> None:
    """Too few microbatches, orders that do not fit, and orders that never repeat."""
    instance = Instance.of(v_problem(8, 9, 8 * 68))
    scorer = Scorer(instance)
    orders = dict(classic.orders_for(v_problem(8, 9, 8 * 68)))
    assert fold(instance, orders["V-Half"], scorer) is None
    long = v_problem(4, 24, 4 * 68)
    too_much = dict(classic.orders_for(long))["DualPipeV"]
    assert fold(Instance.of(long), too_much, Scorer(Instance.of(long))) is None
    codes = [list(row) for row in dict(classic.orders_for(long))["V-Half"]]
    rng = random.Random(0)
    for row in codes:
        for _ in range(2000):
            k = rng.randrange(len(row) - 1)
            if row[k][0] == W and row[k + 1] != row[k]:
                row[k], row[k + 1] = row[k + 1], row[k]
    instance = replace(Instance.of(long), headroom=(10**9,) * 4)
    folded = fold(instance, codes, Scorer(instance))
    assert folded is None or folded.unfold() == codes


@pytest.mark.parametrize("m", [24, 64])
def test_v_half_beats_the_peers_for_any_count(m: int) -> None:
    """The published profile at p = 8, at the memory of the peer's own V-Half, folded."""
    problem, peer = peer_problem(8, m, "V-Half", "span")
    instance = Instance.of(problem)
    folded = fold(instance, dict(classic.orders_for(problem))["V-Half"], Scorer(instance))
    assert folded is not None
    found = [
        Annealer(folded.instance).run(
            folded.codes, 20_000, seed=k, heat=4e-4, frozen_blocks=folded.frozen_blocks
        )
        for k in (1, 2)
    ]
    assert min(score(instance, replace(folded, codes=codes).unfold()) for codes in found) < peer


@pytest.mark.parametrize("seed", range(60))
def test_actions_without_length_are_folded_whole_or_not_at_all(seed: int) -> None:
    """Zero times make several places of a row start together: what is folded comes back as it was."""
    rng = random.Random(seed)
    stage = StageCost.simple(rng.randint(0, 3), rng.randint(0, 3), 0, 2, 1)
    placement = rng.choice((Placement.v(4), Placement.looped(4, 2), Placement.linear(4)))
    profile = Profile.uniform(stage, placement.num_stages, rng.randint(0, 1))
    cap = rng.choice((12, 16, 24))
    problem = Problem.of(profile, placement, rng.choice((12, 16)), cap, rng.choice(("span", "makespan")))
    instance, scorer = Instance.of(problem), Scorer(Instance.of(problem))
    orders = [codes for _, codes in classic.orders_for(problem)]
    dispatcher = Dispatcher(instance)
    for setting in chain(round_settings(instance), islice(in_order_settings(instance, 10**6), 9)):
        codes = dispatcher.run(setting.keys(instance), setting.recipe)
        orders += [codes] if codes is not None else []
    for codes in orders:
        folded = fold(instance, codes, scorer)
        if folded is not None:
            assert folded.unfold() == codes
            assert Scorer(folded.instance).score(folded.codes) is not None
    check(plan(problem, time_limit_s=0.3).schedule, problem)
