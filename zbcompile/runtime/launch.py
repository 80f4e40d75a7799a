"""Start the processes of a pipeline on this machine, for tests, benchmarks and the demo.

A cluster uses torchrun. What is opened here listens on the loopback interface alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from zbcompile.errors import PipelineError

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext

__all__ = ["Outcome", "spawn", "spawn_outcomes"]

T = TypeVar("T")

_LOOPBACK = "127.0.0.1"
_STARTING = threading.RLock()  # a copy of this process is made while it is held, and may start others


@dataclass(frozen=True)
class Outcome:
    """How one process ended.

    Attributes
    ----------
    rank
        Which process.
    value
        What the function returned.
    error
        Its traceback, whose last line names the exception; None if it returned.
    exit_code
        Exit code of the process; negative for a signal; None if it had to be ended from here.
    seconds
        From the start of all processes to the end of this one.
    """

    rank: int
    value: object
    error: str | None
    exit_code: int | None
    seconds: float


def spawn(
    function: Callable[..., T],
    num_processes: int,
    args: Sequence[object] = (),
    *,
    timeout_s: float = 300.0,
    inherit: bool = False,
) -> list[T]:
    """Run ``function(rank, *args)`` in processes that are joined in a gloo process group.

    Parameters
    ----------
    function
        What to run. It must be importable, unless ``inherit`` is set.
    num_processes
        How many processes.
    args
        Further arguments, the same for all.
    timeout_s
        Limit in seconds for all processes together.
    inherit
        Make the processes copies of this one; the function may then be anything. Autograd's threads do not
        come along: a copy must not call ``backward``.

    Returns
    -------
    list
        What the function returned, by rank.

    Raises
    ------
    PipelineError
        A process failed (with the first traceback), or the time is over (the processes are then ended).
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
    return [cast("T", o.value) for o in outcomes]


def spawn_outcomes(
    function: Callable[..., object],
    num_processes: int,
    args: Sequence[object] = (),
    *,
    timeout_s: float = 300.0,
    inherit: bool = False,
) -> list[Outcome]:
    """Do as `spawn` does, but return how every process ended and raise nothing."""
    context = _context(inherit)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    # Another thread's half-made store or open pipe would be copied into these processes.
    with _STARTING:
        store = _loopback_store()
        start = time.monotonic()
        for rank in range(num_processes):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(sender, function, rank, num_processes, store.port, tuple(args)),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
    return _collect(processes, pipes, start, timeout_s)


def _loopback_store() -> TCPStore:
    """Return a store that only this machine can reach: by itself it would listen on all addresses."""
    with socket.create_server((_LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        return TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )


def _loopback_interface() -> str | None:
    """Return the name of the loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def _context(inherit: bool) -> ForkContext | ForkServerContext | SpawnContext:
    if inherit:
        return multiprocessing.get_context("fork")
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zbcompile.pipeline"])
    return context


def _child(
    pipe: Connection,
    function: Callable[..., object],
    rank: int,
    size: int,
    port: int,
    args: tuple[object, ...],
) -> None:
    """Join the group, run the function, and send (value, traceback) through the pipe."""
    torch.set_num_threads(1)
    code = 0
    answer: tuple[object, str | None] = (None, None)
    try:
        store = TCPStore(_LOOPBACK, port, is_master=False, timeout=timedelta(seconds=120))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        interface = _loopback_interface()
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
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


def _collect(
    processes: list[BaseProcess], pipes: list[Connection], start: float, timeout_s: float
) -> list[Outcome]:
    """Read what the processes send until all have ended, or kill those that are late."""
    answers: dict[int, tuple[object, str | None]] = {}
    ended: dict[int, tuple[int | None, float]] = {}
    open_pipes = dict(enumerate(pipes))
    alive = dict(enumerate(processes))
    while alive and time.monotonic() - start < timeout_s:
        things: list[Connection | int] = [*open_pipes.values(), *(p.sentinel for p in alive.values())]
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
