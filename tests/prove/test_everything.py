"""A sample of ``make prove PROVE=--everything``: plans, bounds and certificates of problems of every kind."""

from __future__ import annotations

import pytest

from tests.prove.everything import attack, attack_bounds, make_task

KINDS = {"async", "rendezvous", "batched", "variants", "unequal", "cuts"}


@pytest.mark.parametrize("seed", [20003, 20006, 20009, 20012, 20016])
def test_what_a_plan_claims_holds(seed: int) -> None:
    assert attack(make_task(seed), seconds=0.3, exact_s=0.5, seed=seed).faults == ()


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_no_bound_lies_above_an_order_and_all_are_derived_again(first: int) -> None:
    for seed in range(first, first + 8):
        assert attack_bounds(make_task(seed), exact_s=0.1, seed=seed).faults == (), seed


def test_the_sample_has_problems_of_every_kind() -> None:
    assert {make_task(seed).kind for seed in range(24)} == KINDS
