"""All ranks in one process: the ranks take turns, deterministically, and a deadlock is seen at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zbcompile.errors import PipelineError, ZBCompileError
from zbcompile.runtime.channels.channel import describe
from zbcompile.runtime.program import Program
from zbcompile.runtime.spec import Step
from zbcompile.runtime.verbs import Rank
from zbcompile.runtime.wait import Wait, Waits
from zbcompile.schedule.ir import Kind

__all__ = ["failure", "run_together"]

_LAST = 1 << 62


def run_together(
    ranks: Sequence[Rank],
    programs: Sequence[Program],
    step: Step,
    predicted: Mapping[tuple[Kind, int, int], int],
) -> None:
    """Run one step of every rank: of the ranks that can go on, always the one whose next action starts first.

    Parameters
    ----------
    ranks
        All ranks.
    programs
        The program of each.
    step
        The inputs of the step; losses and results are filled in.
    predicted
        Planned start of every compute action; decides whose turn it is, never results.

    Raises
    ------
    PipelineError
        The ranks deadlocked (the error names each rank's next action and what it waits for), or an action
        failed (the error is chained to its cause). No gradient has then been handed over.
    """
    with torch.no_grad():
        running: list[Waits] = []
        for rank, program in zip(ranks, programs, strict=True):
            rank.begin(step, program.send_slots)
            running.append(program.start(rank))
        waits: dict[int, Wait] = {}
        for index in range(len(ranks)):
            _resume(index, ranks, running, waits)
        while waits:
            able = [i for i, wait in waits.items() if all(ticket.ready() for ticket in wait.tickets)]
            if not able:
                raise _deadlock(waits)
            index = min(able, key=lambda i: (_start(waits[i], predicted), i))
            _resume(index, ranks, running, waits)
        for rank in ranks:
            rank.check_finished()


def _start(wait: Wait, predicted: Mapping[tuple[Kind, int, int], int]) -> int:
    if wait.kind is None:
        return _LAST
    return predicted.get((wait.kind, wait.stage, wait.microbatch), 0)


def _resume(index: int, ranks: Sequence[Rank], running: list[Waits], waits: dict[int, Wait]) -> None:
    """Run a rank until its next wait, which is noted in ``waits``, or to the end of its program."""
    try:
        waits[index] = next(running[index])
    except StopIteration:
        waits.pop(index, None)
    except Exception as error:
        raise failure(ranks[index], error) from error


def failure(rank: Rank, error: Exception, number: int | None = None) -> PipelineError:
    """Return the error that every rank raises for what went wrong on this one.

    ``number`` is its own among all ranks, where there are several pipelines.
    """
    if isinstance(error, PipelineError):
        return error
    where = f"rank {rank.index if number is None else number}"
    if rank.running is not None:
        kind, stage, microbatch = rank.running
        where += f", stage {stage}, microbatch {microbatch}, {kind.value}"
    if isinstance(error, ZBCompileError) and error.where:
        where = ""  # the error's own text says it
    return PipelineError(f"{type(error).__name__}: {error}", where=where)


def _deadlock(waits: Mapping[int, Wait]) -> PipelineError:
    lines = []
    for index, wait in sorted(waits.items()):
        missing = [t for t in wait.tickets if not t.ready()]
        words = "; ".join(f"{describe(t.key)} (rank {t.peer})" for t in missing)
        lines.append(f"rank {index} at {wait} waits for {words}")
    return PipelineError(
        "deadlock: no rank can go on\n    " + "\n    ".join(lines),
        fix="`zbcompile check` names the circle; a schedule that passes it cannot come here",
    )
