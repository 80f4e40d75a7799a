"""What the processes of `test_kill` run, and where one of them is killed, stopped or interrupted."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from tests.support.ways_out import attempt, batch, expected, make_pipeline
from zbcompile.runtime.launch import _loopback_store

RANKS, LIMIT_S = 4, 3.0
STILL_S = LIMIT_S + 4.0
"""How long a stopped process stands still."""

SIGNALS = ("KILL", "TERM", "STOP", "INT")
PHASES = {"build": 2.5, "first step": 0.5, "step": 0.1, "first eval": 1.0, "eval": 0.1, "close": 0.05}
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
                script += f"; sleep {STILL_S}; kill -CONT {pid}"
            self.sender = subprocess.Popen(["sh", "-c", script])

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.sender is not None and self.sender.poll() is None:
            self.sender.kill()


def live(rank: int, point: KillPoint, folder: str) -> dict[str, Any]:
    """Compile, step, evaluate and close; return how it ended, when, and whether all gradients were right."""
    if point.rank_0_keeps_store:
        _move_store(rank)
    x, y = batch()
    right = [True]

    def step() -> None:
        pipeline.zero_grad()
        pipeline.step(x, target=y)
        own = dict(pipeline.named_parameters())
        right[0] &= all(torch.allclose(own[n].grad, wanted[n], atol=1e-6) for n in own)  # type: ignore[arg-type]

    def whole() -> None:
        run.phase("build")
        pipeline.build((x,), {}, y)
        for name, call in PARTS:
            run.phase(name)
            call()
        pipeline.synchronize()
        run.phase("close")
        pipeline.close()

    def evaluate() -> None:
        pipeline.eval(x)

    PARTS: list[tuple[str, Callable[[], None]]] = [
        ("first step", step),
        ("step", step),
        ("first eval", evaluate),
        ("eval", evaluate),
        ("step again", step),
    ]
    wanted = expected()
    pipeline = make_pipeline(stall_limit=LIMIT_S)
    with Run(rank, point, folder) as run:
        seen = attempt(whole)
        ended = time.time()
        built = pipeline._compiled is not None
        again = attempt(step) if seen.kind else None
        attempt(pipeline.close)
    return {
        "kind": seen.kind,
        "text": seen.text,
        "at": ended,
        "built": built,
        "right": right[0],
        "again": None if again is None else (again.kind, again.text),
    }


def _move_store(rank: int) -> None:
    """Make a default process group whose store lives in rank 0."""
    first = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = _loopback_store()
        first.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(first.get("port")), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
