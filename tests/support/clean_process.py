"""Run a function in a fresh process: copies of it inherit no thread and no lock of other tests."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar, cast

import torch

T = TypeVar("T")


def in_clean_process(function: Callable[..., T], *args: object, timeout_s: float = 300.0) -> T:
    """Return ``function(*args)`` of a process from the fork server; an error there fails the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zbcompile.pipeline"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        assert receiver.poll(timeout_s), f"{function.__name__} has not ended after {timeout_s:g} s"
        value, error = pickle.loads(receiver.recv_bytes())  # noqa: S301
    finally:
        process.kill()
        process.join()
    assert error is None, error
    return cast("T", value)


def _run(sender: Connection, function: Callable[..., object], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    try:
        answer = function(*args), None
    except BaseException:
        answer = None, traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
