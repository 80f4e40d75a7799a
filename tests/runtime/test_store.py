"""The key-value store: a process that keeps it and stands still, and who can reach it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from tests.support.frozen import listeners, listening, stand_still, start_without_store
from tests.support.gloo_workers import one_f_one_b, sleeping_profile
from tests.support.ways_out import LIMIT_S, RANKS
from zbcompile.compiler.rehearsal import rehearse
from zbcompile.planner.imported import rated
from zbcompile.runtime.launch import spawn
from zbcompile.schedule.problem import Problem

pytestmark = pytest.mark.timeout(200)

LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


@pytest.mark.parametrize("where", ["build", "step", "evaluation"])
def test_the_stall_limit_holds_when_the_keeper_of_the_store_stands_still(where: str) -> None:
    records = spawn(stand_still, RANKS, (where,), timeout_s=120)
    seen = [record["seen"] for record in records[1:]]
    assert {s.kind for s in seen} == {"PipelineError"}, seen
    assert len({s.text for s in seen}) == 1, seen
    assert "the key-value store of the process group does not answer" in seen[0].text
    late = max(s.at for s in seen) - records[0]["stopped_at"]
    print(f"named on the last rank after {late:.2f} s")
    assert LIMIT_S <= late < LIMIT_S + 3.0
    assert records[0]["seen"].kind in ("PipelineError", "RuntimeError"), records[0]["seen"]
    for record in records[1:]:
        assert record["again"] is None or record["again"].text == seen[0].text


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_pipeline_that_begins_while_the_keeper_of_the_store_stands_still_is_refused_in_time() -> None:
    seen, seconds = spawn(start_without_store, 2, timeout_s=60)[1]
    assert seen.kind == "PipelineError"
    assert "the key-value store of the process group does not answer" in seen.text
    assert 1.0 <= seconds < 2.0


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_what_we_open_ourselves_listens_on_the_loopback_interface_alone() -> None:
    for found in spawn(listening, RANKS, (os.getpid(),), timeout_s=120):
        assert found["own"]
        assert found["store"]
        assert {*found["own"], *found["store"]} <= set(LOOPBACK), found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_a_rehearsal_listens_on_the_loopback_interface_alone() -> None:
    schedule = one_f_one_b()
    solution = rated(schedule, Problem.of(sleeping_profile(), schedule.placement, schedule.num_microbatches))
    seen: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.1):
            for pid in _family(os.getpid()):
                with contextlib.suppress(OSError):  # it has ended
                    seen.update(listeners(pid))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        assert rehearse(solution, steps=3) is not None
    finally:
        done.set()
        watcher.join()
    assert seen
    assert seen <= set(LOOPBACK)


def _family(root: int) -> list[int]:
    """Return a process and all that descend from it."""
    parent_of = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent_of[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family = [root]
    for pid in family:
        family += [child for child, parent in parent_of.items() if parent == pid]
    return family
