"""Kernels: compiled and plain alike, compiled off the clock, in any cache folder, and without numba."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.places import ROOT
from zbcompile.planner import placements
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.core import compiled
from zbcompile.planner.core.compiled import can_compile, jit, uncounted_seconds, vector
from zbcompile.planner.core.instance import Instance, to_schedule
from zbcompile.planner.imported import rated
from zbcompile.planner.incumbent import Incumbent, Order
from zbcompile.planner.run import Run
from zbcompile.planner.starts.initial import one_at_a_time
from zbcompile.planner.variants import plan_variants
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution

limits = types.ModuleType("limits")
limits.MOST = 7  # type: ignore[attr-defined]

V = Problem.of(Profile.uniform(StageCost.simple(30, 31, 17, 10, 4), 8, 2), Placement.v(4), 8, 80)

SUM = """
from tests.planner.test_compiled import _sum_of_twice
from zbcompile.planner.core.compiled import vector
print(_sum_of_twice(vector([1, 2, 3])))
"""

NO_NUMBA = """
import sys, time
sys.modules["numba"] = None
from tests.planner.test_compiled import V
from zbcompile.planner.core.dispatch import Dispatcher, Recipe
from zbcompile.planner.core.instance import B, F, Instance, W
from zbcompile.planner.core.score import latest_starts
from zbcompile.planner.core.score import value_of
from zbcompile.planner.plan import plan
from zbcompile.planner.starts.classic import orders_for
began = time.monotonic()
value = plan(V, time_limit_s=3).certificate.value_ns
took = time.monotonic() - began
instance = Instance.of(V)
S, m = instance.num_stages, instance.num_microbatches
known = []
for name, codes in orders_for(V):
    if all(kind < 3 for row in codes for kind, _ in row):
        starts = latest_starts(instance, codes)
        keys = [starts[kind, s, i] for kind in (F, B, W) for s in range(S) for i in range(m)]
        placed = Dispatcher(instance).run(keys, Recipe())
        known += [value_of(instance, order) for order in (codes, placed) if order is not None]
print(value <= min(known), took < 8, len(known))
"""


@jit
def _twice(values, k):
    return values[k] + values[k]


@jit
def _sum_of_twice(values):
    total = 0
    for k in range(len(values)):
        total += _twice(values, k)
    return total


@jit
def _sum_of_first_and_last(values):
    return _twice(values, 0) + _twice(values, len(values) - 1)


@jit
def _limited(values):
    return min(values[0], limits.MOST)


def run_script(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )


def test_a_kernel_runs_on_lists_as_it_is_and_on_arrays_compiled() -> None:
    assert _sum_of_twice([1, 2, 3]) == 12
    before = uncounted_seconds()
    assert _sum_of_twice(vector([1, 2, 3])) == 12
    if can_compile():
        assert uncounted_seconds() > before
        before = uncounted_seconds()
        assert _sum_of_twice(vector([4])) == 8
    assert uncounted_seconds() == before


def test_a_kernel_that_others_call_is_compiled_once_whatever_constants_it_is_given() -> None:
    if not can_compile():
        pytest.skip("nothing is compiled")
    assert _sum_of_first_and_last.dispatcher(cache=False)(vector([1, 2, 3])) == 8
    assert len(_twice.called_by_kernels().overloads) == 1


def test_the_cached_form_of_a_kernel_is_not_that_for_another_constant_of_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """numba's cache looks at a kernel's own file alone."""
    if not can_compile():
        pytest.skip("nothing is compiled")
    assert _limited.dispatcher(cache=True)(vector([9])) == 7
    monkeypatch.setattr(limits, "MOST", 8)
    assert _limited.dispatcher(cache=True)(vector([9])) == 8


def test_an_interrupt_while_a_kernel_is_loaded_waits_until_it_is_there() -> None:
    """The best order is rated and written with kernels, and numpy loaded by half cannot be loaded again."""
    loaded = []

    def load() -> None:
        signal.raise_signal(signal.SIGINT)
        loaded.append("whole")

    with pytest.raises(KeyboardInterrupt):
        compiled.uncounted(load)
    assert loaded == ["whole"]
    assert compiled.uncounted(lambda: 5) == 5


def test_seconds_of_compiling_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    incumbent = Incumbent(V, best_bound(V), time_limit_s=10)
    assert incumbent.seconds_left <= 10
    monkeypatch.setattr(compiled._Spent, "seconds", uncounted_seconds() + 100)
    assert 100 < incumbent.seconds_left <= 110


def test_they_are_not_counted_for_placements_and_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan of these gets its share of a limit that compiling, here of 100 s each, does not shorten."""
    limits: list[float] = []

    def compiling() -> None:
        monkeypatch.setattr(compiled._Spent, "seconds", uncounted_seconds() + 100)
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 100)

    def slowly(problem: Problem, *, time_limit_s: float, **_: object) -> Solution:
        limits.append(time_limit_s)
        compiling()
        return rated(to_schedule(one_at_a_time(Instance.of(problem)), problem), problem)

    monkeypatch.setattr(placements, "plan", slowly)
    placements.plan_auto(V, time_limit_s=30)
    assert len(limits) > 1
    assert min(limits) > 9
    limits.clear()
    lean = replace(V.profile.stages[0], saved_bytes=1)
    some = tuple(replace(stage, variants=(lean,)) for stage in V.profile.stages)
    offered = V.with_(profile=replace(V.profile, stages=some))

    def find(problem: Problem, limit: float, *_: object, **__: object) -> Solution:
        return slowly(problem, time_limit_s=limit)

    def quick(problem: Problem, _: float) -> tuple[int, Order]:
        compiling()
        return problem.work_ns(0), Order(one_at_a_time(Instance.of(problem)), ("one_at_a_time",))

    plan_variants(offered, find, quick, time_limit_s=30)
    assert limits
    assert min(limits) > 4


def test_the_observer_is_told_before_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(compiled._Spent, "kernels", False)
    run = Run(V, time_limit_s=10, observer=lambda progress: steps.append(progress.step))
    assert run.scorer.instance is run.instance
    assert steps == ["compile"]
    monkeypatch.setattr(compiled._Spent, "kernels", True)
    assert Run(V, time_limit_s=10, observer=lambda progress: steps.append(progress.step)).scorer
    assert steps == ["compile"]


def test_any_cache_folder_will_do(tmp_path: Path) -> None:
    """A fresh folder, a full one, one whose files are broken, and one that cannot be made."""
    cache = tmp_path / "cache"
    for _ in range(2):
        assert run_script(SUM, NUMBA_CACHE_DIR=str(cache)).stdout == "12\n"
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert files or not can_compile()
    for path in files:
        path.write_bytes(b"broken")
    (tmp_path / "file").touch()
    for folder in (cache, tmp_path / "file" / "cache"):
        result = run_script(SUM, NUMBA_CACHE_DIR=str(folder))
        assert (result.stdout, result.stderr) == ("12\n", "")


def test_without_numba_the_limit_holds_and_no_classic_order_is_shorter() -> None:
    """Nor one that is placed anew by the real times; a warning says why the search is slow, once."""
    result = run_script(NO_NUMBA)
    shorter, in_time, known = result.stdout.split()
    assert (shorter, in_time) == ("True", "True")
    assert int(known) >= 4
    assert result.stderr.count("RuntimeWarning") == 1
    assert "numba is missing" in result.stderr


@pytest.mark.parametrize(
    "line",
    [
        "import zbcompile",
        "from zbcompile.planner.plan import plan",
        "from zbcompile.cli.main import main; main(['plan', 'examples/profiles/four-unequal-stages.json'])",
    ],
)
def test_numba_is_imported_by_the_search_alone(line: str) -> None:
    """What the first orders prove needs no numba either."""
    script = f"import sys; {line}; print('numba' in sys.modules, file=sys.stderr)"
    assert run_script(script).stderr.splitlines()[-1] == "False"
