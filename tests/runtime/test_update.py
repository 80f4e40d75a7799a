"""Optimizers without a barrier: four ranks against the plain loop, and how such a step may end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import update_workers
from tests.support.life_workers import Chain, compiled
from tests.support.update_workers import (
    MAKERS,
    MAX_NORM,
    POISONED,
    Noisy,
    half_frozen,
    half_frozen_chain,
    half_frozen_scaled,
    lived,
    piped,
    plain,
)
from zbcompile.runtime.launch import spawn, spawn_outcomes

pytestmark = pytest.mark.timeout(200)


def test_four_ranks_that_do_not_wait_train_as_the_plain_loop() -> None:
    """With steps that clip, one that is left out, groups, a schedule, several optimizers, tied weights."""
    there = spawn(update_workers.train_all, 4, (), timeout_s=150)
    names = [*MAKERS, "groups tied", "barrier"]
    assert set(there[0]) == set(names)
    for name in names:
        make = MAKERS["groups" if name == "barrier" else name.removesuffix(" tied")]
        if "tied" in name:  # autograd sums the gradient of a tied weight in another order
            state, updates = piped(compiled(Chain(tied=True), 4), make)
            norms = [float(update.norm) for update in updates]
        else:
            state, norms = plain(make)
        assert {key for part in there for key in part[name][0]} == state.keys(), name
        for part in there:
            own, decided = part[name]
            assert all(torch.equal(tensor, state[key]) for key, tensor in own.items()), name
            assert [(n, c, s) for n, c, s in decided if not s] == [
                (n, n > MAX_NORM, False) for k, n in enumerate(norms) if k != POISONED
            ]
            assert [k for k, (_, _, skipped) in enumerate(decided) if skipped] == [POISONED]
            assert {c for _, c, skipped in decided if not skipped} == {False, True}, name


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four ranks have seen."""
    return spawn(update_workers.live, 4, (str(tmp_path_factory.mktemp("lives")),), timeout_s=150)


def test_with_much_between_the_steps_four_ranks_see_what_one_process_sees(
    lives: list[dict[str, Any]],
) -> None:
    """Dropout, running statistics, accumulation, other shapes, evaluations, weights read while on trial."""
    with compiled(Noisy(), 4) as pipeline:
        alone = lived(pipeline)
    alone["half frozen"] = half_frozen(half_frozen_chain())
    for part in lives:
        for name in ("read by this process alone", "at last", "moments", "half frozen"):
            assert all(torch.equal(tensor, alone[name][key]) for key, tensor in part[name].items()), name
        assert part["norms"] == alone["norms"]
    assert {key for part in lives for key in part["at last"]} == alone["at last"].keys()
    assert {key for part in lives for key in part["moments"]} == alone["moments"].keys()
    assert torch.equal(lives[-1]["evaluated"], alone["evaluated"])
    assert all(map(torch.equal, lives[-1]["losses"], alone["losses"]))
    assert len(lives[-1]["losses"]) == len(alone["losses"])


def test_a_rank_that_trains_nothing_has_a_scaler_too(lives: list[dict[str, Any]]) -> None:
    alone = half_frozen_scaled(half_frozen_chain())
    assert alone["scales"] == [8.0, 4.0, 4.0, 8.0]
    for part in lives:
        scaled = part["scaled"]
        assert scaled.pop("scales") == alone["scales"]
        assert all(torch.equal(tensor, alone[name]) for name, tensor in scaled.items())


def test_no_rank_waits_for_another_before_its_next_forward(lives: list[dict[str, Any]]) -> None:
    """With a barrier this would never end: the last rank waits for the first one's next forward."""
    assert lives[0]["again"], "the forward that had begun was run again after the clipping"


def test_what_ranks_do_differently_is_refused_on_all_and_what_is_not_finite_raises_if_asked(
    lives: list[dict[str, Any]],
) -> None:
    for rank, seen in enumerate(lives):
        kind, text = seen["max_norm"]
        assert kind == "UsageError"
        assert "the ranks call for different norms" in text
        assert "optimizer_step(2.0, 2.0, False)" in text
        kind, text = seen["not finite"]
        assert kind == "PipelineError"
        assert "of all gradients is inf" in text
        assert seen["kept"]
        for name in ("changed", "changed again"):
            kind, text = seen[name]
            assert "a parameter was changed while" in text
            assert "(middle.weight)" in text
            assert kind == ("UsageError" if rank == 1 else "PipelineError")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_dies_meanwhile_ends_the_step_on_all_others(when: str) -> None:
    outcomes = spawn_outcomes(update_workers.die, 4, (when,), timeout_s=60)
    assert outcomes[2].exit_code == 3
    for outcome in (outcomes[0], outcomes[1], outcomes[3]):
        assert outcome.exit_code == 0, outcome.error
        told = outcome.value
        assert told[0].startswith("PipelineError: rank 2 is gone"), told
        assert told[0] == outcomes[0].value[0]
        assert outcome.seconds < 45
