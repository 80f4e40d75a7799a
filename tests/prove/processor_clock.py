"""Time limits that count processor seconds, so that what else the machine does changes no count of proofs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from ortools.sat.python import cp_model

from zbcompile.planner.exact import model

__all__ = ["processor_clock"]

_POLL_S = 0.005


@contextmanager
def processor_clock() -> Iterator[None]:
    """Let planner and solver count the processor seconds of this process instead of those of the wall.

    For problems that no part of the planner searches with two threads at once.
    """
    used: dict[int, float] = {}

    def run(solver: cp_model.CpSolver, asked: cp_model.CpModel) -> object:
        limit, began = solver.parameters.max_time_in_seconds, time.process_time()
        solver.parameters.max_time_in_seconds = float("inf")
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_POLL_S):
                if time.process_time() - began >= limit:
                    solver.stop_search()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            return solver.solve(asked)
        finally:
            over.set()
            watcher.join()
            used[id(solver)] = time.process_time() - began

    seconds = property(lambda solver: used[id(solver)])
    with (
        mock.patch.object(model, "run", run),
        mock.patch.object(cp_model.CpSolver, "wall_time", seconds),
        mock.patch.object(time, "monotonic", time.process_time),
    ):
        yield
