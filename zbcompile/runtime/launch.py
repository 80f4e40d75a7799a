"""Processes for a pipeline on this machine, for tests, benchmarks and the demo. A cluster uses torchrun."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from zbcompile.errors import PipelineError

__all__ = ["Outcome", "spawn", "spawn_outcomes"]


@dataclass(frozen=True)
class Outcome:
    """How one process ended.

    value : what the function returned. error : its traceback, its last line naming the exception; None when
    it returned. exit_code : of the process; negative for a signal; None when it had to be ended by us.
    seconds : from the start of all processes to the end of this one.
    """

    rank: int
    value: Any
    error: str | None
    exit_code: int | None
    seconds: float


def spawn(
    function: Callable[..., Any],
    num_processes: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 300.0,
    inherit: bool = False,
) -> list[Any]:
    """Run ``function(rank, *args)`` in processes joined in a gloo process group; values by rank.

    The function must be importable; with ``inherit`` the processes are copies of this one and it may be
    anything
    (autograd's threads do not come along: a copy must not call ``backward``). Raises `PipelineError` with
    the first traceback when a process fails, and when the time is over (the processes are then ended).
    """
    outcomes = spawn_outcomes(function, num_processes, args, timeout_s=timeout_s, inherit=inherit)
    for outcome in outcomes:
        if outcome.exit_code is None:
            raise PipelineError(
                "a process did not end in time", where=f"rank {outcome.rank}", needed=timeout_s
            )
    failed = [o for o in outcomes if o.exit_code != 0]
    if failed:
        first = min(failed, key=lambda o: (o.error is None, o.seconds))
        raise PipelineError(
            f"process {first.rank} ended with code {first.exit_code}\n{first.error or ''}".rstrip(),
            where=f"rank {first.rank}",
        )
    return [o.value for o in outcomes]


def spawn_outcomes(
    function: Callable[..., Any],
    num_processes: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 300.0,
    inherit: bool = False,
) -> list[Outcome]:
    """The same, with how every process ended instead of an error."""
    method = "fork" if inherit else "forkserver" if sys.platform == "linux" else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["zbcompile.pipeline"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    start = time.monotonic()
    for rank in range(num_processes):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_child, args=(sender, function, rank, num_processes, store.port, tuple(args)), daemon=True
        )
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    return _collect(processes, pipes, start, timeout_s)


def _child(
    pipe: Connection, function: Callable[..., Any], rank: int, size: int, port: int, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    code = 0
    answer: tuple[Any, str | None] = (None, None)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group("gloo", store=PrefixStore("spawn", store), rank=rank, world_size=size)
        answer = (function(rank, *args), None)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        answer = (None, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _collect(processes: list[Any], pipes: list[Connection], start: float, timeout_s: float) -> list[Outcome]:
    answers: dict[int, tuple[Any, str | None]] = {}
    ended: dict[int, tuple[int | None, float]] = {}
    open_pipes = dict(enumerate(pipes))
    alive = dict(enumerate(processes))
    while alive and time.monotonic() - start < timeout_s:
        things = [*open_pipes.values(), *(p.sentinel for p in alive.values())]
        wait(things, timeout=max(0.0, timeout_s - (time.monotonic() - start)))
        for rank, pipe in list(open_pipes.items()):
            if pipe.poll():
                with contextlib.suppress(EOFError):
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # noqa: S301
                del open_pipes[rank]
        for rank, process in list(alive.items()):
            if not process.is_alive() and rank not in open_pipes:
                process.join()
                ended[rank] = (process.exitcode, time.monotonic() - start)
                del alive[rank]
    for rank, process in alive.items():
        process.kill()
        process.join()
        ended[rank] = (None, time.monotonic() - start)
    return [Outcome(rank, *answers.get(rank, (None, None)), *ended[rank]) for rank in range(len(processes))]
