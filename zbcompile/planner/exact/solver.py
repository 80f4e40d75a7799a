"""CP-SAT as it is asked here: right where times are long, and ended by Ctrl-C.

The solver leaves the signal alone, and a question asked on the main thread ends.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from ortools.sat.python import cp_model

__all__ = ["run"]

_MOST_PRESOLVED = 1 << 31
"""Longest horizon of a model that is presolved. Beyond 10^10, CP-SAT 9.15 has called models infeasible that
have solutions, and no more without presolve."""


def run(solver: cp_model.CpSolver, model: cp_model.CpModel, horizon: int) -> object:
    """Solve a model and return CP-SAT's status.

    ``horizon`` is the greatest time in the model.

    By itself the solver takes SIGINT for as long as it runs, keeps it from Python, and then leaves the
    process with the signal's default action: the next Ctrl-C would kill it. Without that, Python hears of the
    signal only between its own instructions, so the main thread waits for another thread.

    Raises
    ------
    KeyboardInterrupt
        Ctrl-C, after the search has ended.
    """
    solver.parameters.catch_sigint_signal = False
    solver.parameters.cp_model_presolve = horizon <= _MOST_PRESOLVED
    if threading.current_thread() is not threading.main_thread():
        return solver.solve(model)
    with ThreadPoolExecutor(1) as thread:
        status = thread.submit(solver.solve, model)
        try:
            return status.result()
        finally:
            while not status.done():
                solver.stop_search()
                time.sleep(0.01)
