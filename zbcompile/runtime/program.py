"""A rank's program as something to run: the emitted text, compiled under a name that tracebacks can show."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import CodeType
from typing import Any

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """The text of one rank's program and its entry point.

    ``start(rank)`` makes the generator: it yields a `zbcompile.runtime.verbs.Wait` wherever it has to wait
    and goes on when resumed. ``send_slots`` is the text's own constant.
    """

    text: str
    name: str
    start: Callable[[Any], Generator[Any, None, None]]
    send_slots: int | None

    @staticmethod
    def load(text: str, rank: int) -> Program:
        """Compile a text that `zbcompile.passes.lower.codegen.emit` made. Its lines appear in tracebacks."""
        name = f"<program of rank {rank}>"
        code: CodeType = compile(text, name, "exec")
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        module: dict[str, Any] = {"__name__": f"zbcompile_program_{rank}"}
        exec(code, module)  # noqa: S102
        return Program(text, name, module["program"], module["SEND_SLOTS"])
