"""A process is killed, stopped or interrupted at random: all others end in time and by name, or rightly.

``make kill`` tries 100 points; the suite tries 10. `KillPoint.of(seed)` is one of them:
``make kill KILL_POINTS=1 KILL_SEED=seed`` tries it again.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import Tensor

import zbcompile
from tests.support.clean_process import in_clean_process
from tests.support.kill_points import LIMIT_S, RANKS, KillPoint, live
from tests.support.ways_out import batch, expected, make_pipeline
from zbcompile.runtime.launch import Outcome, spawn_outcomes

SLACK_S = 3.0
"""Seconds beyond the stall limit from the signal to the last error, times the processes that share a core."""

WORK_S = {"build": 3.0, "first eval": 1.5}
"""Seconds of work of their own that the others may have left at the signal, before they wait for its rank."""

AT_ONCE = 2
"""Points that are tried at the same time."""

ENDS = {"KILL": -9, "TERM": -15}


@pytest.mark.timeout(3600)
def test_whatever_is_killed_all_others_end_in_time(
    kill_points: range, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reports = in_clean_process(tried_all, kill_points, tmp_path, timeout_s=60.0 * len(kill_points))
    with capfd.disabled():
        print()
        for point, late, ends, _ in reports:
            where = f"SIG{point.signal} to rank {point.rank} {point.delay_s:.2f} s into the {point.phase}"
            store = ", which keeps the store" if point.rank_0_keeps_store and point.rank == 0 else ""
            print(f"  {point.seed:>4} {where + store:<72} {late:6.2f} s  {' '.join(ends)}")
    wrong = [f"{point}: {fault}" for point, _, _, faults in reports for fault in faults]
    assert not wrong, "\n".join(wrong)


Report = tuple[KillPoint, float, list[str], list[str]]


def tried_all(kill_points: range, folder: Path) -> list[Report]:
    """Try points; each of their processes is a copy of this one, where the pipeline was compiled."""
    x, y = batch()
    compiled = make_pipeline(example_args=(x,), example_target=y, num_ranks=RANKS, stall_limit=LIMIT_S)
    wanted = expected()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda seed: tried(KillPoint.of(seed), folder, compiled, wanted), kill_points))


def tried(point: KillPoint, folder: Path, compiled: zbcompile.Pipeline, wanted: dict[str, Tensor]) -> Report:
    """Return when the last rank ended after the signal, how each rank ended, and what is wrong with that."""
    folder = folder / str(point.seed)
    folder.mkdir()
    builds = point.phase == "build"
    arguments = (point, str(folder), None if builds else compiled, wanted)
    outcomes = spawn_outcomes(live, RANKS, arguments, timeout_s=90.0, inherit=not builds)
    sent = folder / "sent"
    sent_at = float(sent.read_text()) if sent.exists() and sent.read_text().strip() else time.time()
    ends, faults, late = [], [], 0.0
    for outcome in outcomes:
        if outcome.rank == point.rank and point.signal in ENDS and outcome.exit_code == ENDS[point.signal]:
            ends.append("-")
            continue
        if outcome.exit_code != 0 or not isinstance(outcome.value, dict):
            faults.append(f"rank {outcome.rank} ended with {outcome.exit_code}: {outcome.error}")
            continue
        seen = outcome.value
        ends.append(seen["kind"] or "right")
        faults += [
            f"rank {outcome.rank}: {fault}" for fault in wrong_with(point, outcome, seen["at"] - sent_at)
        ]
        if outcome.rank != point.rank:
            late = max(late, seen["at"] - sent_at)
    return point, late, ends, faults


def wrong_with(point: KillPoint, outcome: Outcome, late: float) -> list[str]:
    """Return what is wrong with how a living rank ended."""
    seen = outcome.value
    assert isinstance(seen, dict)
    kind, text = seen["kind"], seen["text"]
    faults = [] if seen["right"] else ["wrong gradients"]
    if not kind:
        return faults
    own = outcome.rank == point.rank
    if kind != "PipelineError" and not (own and kind == "KeyboardInterrupt"):
        faults.append(f"ended with {kind}: {text}")
    if kind == "PipelineError" and not own and f"rank {point.rank}" not in text:
        keeper = point.rank == 0 and point.rank_0_keeps_store
        if not (keeper and "the key-value store of the process group" in text):
            faults.append(f"does not name rank {point.rank}: {text}")
    crowd = os.getloadavg()[0] / (os.cpu_count() or 1)
    slack = SLACK_S + WORK_S.get(point.phase, 0.0)
    if not own and late > LIMIT_S + slack * max(1.0, crowd):
        faults.append(f"ended {late:.1f} s after the signal: {text}")
    # An interrupt between two calls fails none of them: the rank can go on, and its gradients are right.
    untouched = own and kind == "KeyboardInterrupt" and not seen["failed"]
    may_follow = ("PipelineError", "UsageError", *([""] if untouched else []))
    if seen["again"] is not None and seen["built"] and seen["again"][0] not in may_follow:
        faults.append(f"then {seen['again']}")
    return faults
