"""What the processes of `test_kill` run, and where one of them is killed, stopped or interrupted."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import zbcompile
from tests.support.frozen import move_store
from tests.support.ways_out import attempt, batch, make_pipeline
from zbcompile.runtime.group import PipelineGroup

RANKS, LIMIT_S = 4, 6.0

HANGS_S = 75.0
"""Seconds after which a process that has not ended prints where it stands."""

SIGNALS = ("KILL", "TERM", "STOP", "INT")
PHASES = {"build": 2.5, "first step": 0.15, "step": 0.05, "first eval": 0.8, "eval": 0.05, "close": 0.03}
"""Parts of a run, and the seconds within which a signal comes after their beginning."""


@dataclass(frozen=True)
class KillPoint:
    """Which signal is sent to which rank, how long after which phase began, and who keeps the store."""

    seed: int
    signal: str
    rank: int
    phase: str
    delay_s: float
    rank_0_keeps_store: bool

    @staticmethod
    def of(seed: int) -> KillPoint:
        """Draw a point."""
        random = Random(seed)
        phase = random.choice(list(PHASES))
        return KillPoint(
            seed,
            SIGNALS[seed % len(SIGNALS)],
            random.randrange(RANKS),
            phase,
            random.uniform(0.0, PHASES[phase]),
            random.random() < 0.5,
        )


class Run:
    """One rank's run. As a context manager it calls the sender of the signal back."""

    def __init__(self, rank: int, point: KillPoint, folder: str) -> None:
        self.armed = rank == point.rank
        self.point, self.folder = point, Path(folder)
        self.sender: subprocess.Popen[bytes] | None = None

    def phase(self, name: str) -> None:
        """Begin a phase."""
        if self.armed and name == self.point.phase:
            pid, point = os.getpid(), self.point
            script = (
                f"sleep {point.delay_s:.3f}; date +%s.%N > {self.folder}/sent; kill -{point.signal} {pid}"
            )
            if point.signal == "STOP":
                # It goes on when all others have ended, or after half a minute.
                ended = f"$(ls {self.folder} | grep -c ended)"
                late = f"[ $i -lt 150 ] && [ {ended} -lt {RANKS - 1} ]"
                wait = f"while {late}; do sleep 0.2; i=$((i+1)); done"
                script += f"; i=0; {wait}; kill -CONT {pid}"
            self.sender = subprocess.Popen(["sh", "-c", script])

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.sender is not None and self.sender.poll() is None:
            self.sender.kill()


def live(
    rank: int, point: KillPoint, folder: str, pipeline: zbcompile.Pipeline | None, wanted: dict[str, Tensor]
) -> dict[str, Any]:
    """Compile, step, evaluate and close; return how it ended, when, and whether all gradients were right.

    ``pipeline`` is what was compiled in the process that this one is a copy of; None: it compiles for itself.
    """
    faulthandler.dump_traceback_later(HANGS_S)
    if point.rank_0_keeps_store:
        move_store(rank)
    x, y = batch()
    right = [True]
    mine = make_pipeline(stall_limit=LIMIT_S) if pipeline is None else pipeline

    def step() -> None:
        mine.zero_grad()
        mine.step(x, target=y)
        own = dict(mine.named_parameters())
        grads = {n: p.grad for n, p in own.items() if p.grad is not None}
        right[0] &= grads.keys() == own.keys()
        right[0] &= all(torch.allclose(grad, wanted[n], atol=1e-6) for n, grad in grads.items())

    def build() -> None:
        if pipeline is None:
            mine.build((x,), {}, y)
            return
        group = PipelineGroup(None, LIMIT_S)
        with group.calls.building("the test"):
            pipeline._ready().run_on(group)

    def evaluate() -> None:
        mine.eval(x)

    def end() -> None:
        mine.synchronize()
        run.phase("close")
        mine.close()

    parts: dict[str, list[tuple[str, Callable[[], None]]]] = {
        "step": [("step", step)],
        "first eval": [("first eval", evaluate), ("", step)],
        "eval": [("", evaluate), ("eval", evaluate)],
    }

    def whole() -> None:
        chosen = parts.get(point.phase, [])
        for name, call in [("build", build), ("first step", step), *chosen, ("", step), ("", end)]:
            run.phase(name)
            call()

    with Run(rank, point, folder) as run:
        seen = attempt(whole)
        ended = time.time()
        built = mine._compiled is not None
        failed = mine.failed is not None
        again = attempt(step) if seen.kind else None
        attempt(mine.close)
        (run.folder / f"ended-{rank}").touch()
    return {
        "kind": seen.kind,
        "text": seen.text,
        "at": ended,
        "built": built,
        "failed": failed,
        "right": right[0],
        "again": None if again is None else (again.kind, again.text),
    }
