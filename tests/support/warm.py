"""What a process from the fork server of the tests begins with (`fork_server` in conftest).

Imported, this module has loaded what ranks use, and has compiled and trained once, so that torch and the
planner have filled their tables. It leaves one thread, no process group, and a random state of which nothing
was drawn.
"""

from __future__ import annotations

import os

import ortools.sat.python.cp_model  # noqa: F401 - ranks that plan need it
import torch

import zbcompile
from tests.support.gloo_workers import MODELS, even_profile, train_steps
from tests.support.planner_cases import compile_kernels


def _compile_once() -> None:
    model, call, loss_fn = MODELS["mlp"]()
    with zbcompile.compile(
        model, 4, loss_fn=loss_fn, num_microbatches=4, time_limit=0.5, profile=even_profile()
    ) as pipeline:
        train_steps(pipeline, call, 1)


torch.set_num_threads(1)
with torch.random.fork_rng(devices=[]):
    _compile_once()
    compile_kernels()  # loads numba and the search's kernels
    for name in ("gpt2", "llama"):
        MODELS[name]()  # loads what transformers loads late
threads = len(os.listdir("/proc/self/task"))
if threads != 1:
    raise RuntimeError(f"the fork server of the tests has {threads} threads: copies of it would hang")
