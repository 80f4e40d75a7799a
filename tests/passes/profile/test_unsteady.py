"""A profile measured on a busy machine says so: in `Profile.unsteady`, a warning, `show` and `explain`."""

from __future__ import annotations

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zbcompile
from zbcompile.compiler.stages import build_stages
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.passes.profile import measure as measuring
from zbcompile.show.explain import explained
from zbcompile.show.explain_json import explanation_json
from zbcompile.show.head import head_lines
from zbcompile.show.summary import summarize, to_json

MS = 1_000_000


def _clock(monkeypatch: pytest.MonkeyPatch, taken_ns: list[int]) -> None:
    """Let timed calls take these times, again and again: F, B, W and BW of one run, then of the next."""
    steps = itertools.cycle(taken_ns)
    times = itertools.accumulate(step for taken in steps for step in (1, taken))
    fake = SimpleNamespace(perf_counter=lambda: 0.0, perf_counter_ns=lambda: next(times))
    monkeypatch.setattr(measuring, "time", fake)


def _compiled() -> zbcompile.Pipeline:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return zbcompile.compile(
        model,
        2,
        example_args=(torch.randn(8, 4),),
        example_target=torch.randn(8, 4),
        loss_fn=nn.functional.mse_loss,
        num_microbatches=4,
        time_limit=0.2,
    )


def test_repeats_that_differ_are_named_where_a_user_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    # W is slow in every other run.
    _clock(monkeypatch, [MS, MS, MS, 2 * MS, MS, MS, 50 * MS, 2 * MS])
    with pytest.warns(RuntimeWarning, match=r"W of stage 1 .* in 5 repeats .*OMP_NUM_THREADS=1"):
        pipeline = _compiled()
    with pipeline:
        profile = pipeline.solution.problem.profile
        file = ScheduleFile.of(pipeline.solution)
    assert {spread.kind for spread in profile.unsteady} == {"W"}
    (found, *_) = profile.unsteady
    assert (found.fastest_ns, found.slowest_ns, found.repeats) == (MS, 50 * MS, 5)
    summary = summarize(file)
    assert any("differ widely" in line for line, _ in head_lines(summary))
    as_json = to_json(summary)["unsteady"]
    assert isinstance(as_json, list)
    assert as_json[0] == {
        "place": found.place,
        "kind": "W",
        "fastest_ns": MS,
        "median_ns": found.median_ns,
        "slowest_ns": 50 * MS,
        "repeats": 5,
    }
    assert explanation_json(explained(file))["unsteady"] == as_json


def test_steady_repeats_are_not_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    _clock(monkeypatch, [MS, MS, MS, 2 * MS])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        pipeline = _compiled()
    with pipeline:
        assert pipeline.solution.problem.profile.unsteady == ()
        head = [line for line, _ in head_lines(summarize(ScheduleFile.of(pipeline.solution)))]
    assert not any("differ widely" in line for line in head)


def test_levels_of_recompute_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 4)
    staged = build_stages(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 1, (x,))
    _clock(monkeypatch, [MS, MS, MS, 2 * MS, MS, MS, MS, 2 * MS, *[9 * MS] * 8])
    others = [[stage] for stage in staged.stages]
    profile = measuring.measure(staged.stages, staged.captured.state, [x], others=others)
    places = {spread.place for spread in profile.unsteady}
    assert places == {"stage 0", "stage 0 with recompute 1"}
