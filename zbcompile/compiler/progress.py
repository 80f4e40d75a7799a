"""Saying on standard error which steps of the compiler are done, so that a long `compile` is not silent."""

from __future__ import annotations

import os
import time

from zbcompile.compiler.observe import Observer, quiet
from zbcompile.formats.streams import say

__all__ = ["progress"]


def progress() -> Observer:
    """Return an observer that writes a line to standard error after each step of the compiler.

    A line has the seconds since this call, and the name of the step that is done. Where torchrun has started
    several processes only the one with ``RANK=0`` writes.

    Examples
    --------
    ``compile(model, ..., observer=zbcompile.progress())`` writes lines such as ``[  1.7 s] capture``.
    """
    if os.environ.get("RANK", "0") != "0":
        return quiet
    began = time.monotonic()

    def write(name: str, artifact: object) -> None:
        if "." not in name:
            say(f"[{time.monotonic() - began:5.1f} s] {name}")

    return write
