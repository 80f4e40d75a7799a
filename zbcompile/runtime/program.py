"""A rank's program as something to run: the emitted text, compiled under a name that tracebacks can show."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import cast

from zbcompile.runtime.verbs import Rank
from zbcompile.runtime.wait import Waits

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """One rank's program.

    Attributes
    ----------
    start
        Makes the generator that runs a step on a rank: it yields a `Wait` wherever it has to wait.
    send_slots
        The text's own constant: messages that may be on their way per channel before a send waits.
    """

    start: Callable[[Rank], Waits]
    send_slots: int | None

    @staticmethod
    def load(text: str, rank: int) -> Program:
        """Compile a text that `zbcompile.passes.lower.codegen.emit` made. Its lines appear in tracebacks."""
        name = f"<program of rank {rank}>"
        code: CodeType = compile(text, name, "exec")
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        module: dict[str, object] = {"__name__": f"zbcompile_program_{rank}"}
        exec(code, module)  # noqa: S102
        start = cast("Callable[[Rank], Waits]", module["program"])
        return Program(start, cast("int | None", module["SEND_SLOTS"]))
