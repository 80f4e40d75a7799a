"""Times of a busy machine: what differs widely is said, with its figures, and kept with the profile."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn

import zbcompile
from zbcompile.formats import profile_json
from zbcompile.passes.profile import measure as measuring
from zbcompile.passes.profile.spread import Spread, spread_of, warning_text, widest

MS = 1_000_000


def runs(*times: int) -> list[tuple[int, int, int, int]]:
    """Runs whose B takes these times, and whose other phases are steady."""
    return [(MS, time, MS, 2 * MS) for time in times]


def test_the_widest_phase_is_named_with_its_figures() -> None:
    spread = spread_of(3, runs(MS, 40 * MS, 20 * MS))
    assert spread == Spread(3, "B", MS, 20 * MS, 40 * MS, 3)
    assert str(spread) == "B of stage 3 took 1.00 to 40.00 ms in 3 runs, 20.00 is used"
    assert widest([None, spread_of(1, runs(MS, 3 * MS, 3 * MS)), spread]) == spread
    text = warning_text(spread, 8)
    assert "OMP_NUM_THREADS=1 (torch uses 8 here)" in text


def test_one_late_run_and_short_times_are_no_reason() -> None:
    """The median does not see one late run, and microseconds decide no order."""
    assert spread_of(0, runs(MS, MS, 90 * MS)) is None
    assert spread_of(0, runs(10_000, 60_000, 60_000)) is None
    assert spread_of(0, runs(MS)) is None
    assert widest([None]) is None


def compiled(monkeypatch: pytest.MonkeyPatch, times: list[int]) -> zbcompile.Pipeline:
    """A pipeline whose stages take these times, in turns."""
    turn = itertools.cycle(times)

    def once(stage, state, inputs):
        outputs = stage.run_forward(dict(state), list(inputs))[0]
        ns = next(turn)
        return outputs, (ns, ns, ns, 2 * ns)

    monkeypatch.setattr(measuring, "_time_once", once)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(4, 4)
    return zbcompile.compile(
        model,
        2,
        example_args=(x,),
        example_target=x,
        loss_fn=nn.functional.mse_loss,
        num_microbatches=2,
        time_limit=0.5,
    )


def test_compile_warns_and_the_profile_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(
        RuntimeWarning, match="repeated times differ widely: F of stage 0 took 1.00 to 50.00 ms"
    ):
        pipeline = compiled(monkeypatch, [MS, MS, 50 * MS, 50 * MS, 50 * MS, MS])
    profile = pipeline.solution.problem.profile
    assert "repeated times differ widely: F of stage 0" in profile.source
    assert profile_json.loads(profile_json.dumps(profile)).profile.source == profile.source


def test_steady_times_are_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        pipeline = compiled(monkeypatch, [MS])
    assert "differ" not in pipeline.solution.problem.profile.source
