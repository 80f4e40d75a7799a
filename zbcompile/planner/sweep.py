"""Many problems planned one after the other, and which of them nothing beats in time and memory at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from zbcompile.errors import InfeasibleError, NoOrderError, UsageError
from zbcompile.planner.incumbent import Progress
from zbcompile.planner.plan import plan
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate

__all__ = ["Choice", "Swept", "best", "sweep"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One combination of a sweep.

    Attributes
    ----------
    words
        What was chosen, such as ``{"ranks": "4", "cap": "1.5p"}``; all choices of a sweep have the same keys.
    problem
        The problem; None where the choices do not go together.
    refusal
        Why they do not.
    """

    words: dict[str, str]
    problem: Problem | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Swept:
    """What came of one choice.

    Attributes
    ----------
    words
        As in `Choice`.
    num_microbatches
        Of the step; 0 where nothing was planned.
    value_ns, bound_ns
        The step's span or makespan, and the proved bound, in ns; None where nothing was planned.
    peak_bytes
        Most bytes that any rank holds, static bytes included; None where nothing was planned.
    refusal
        Why nothing was planned.
    """

    words: dict[str, str]
    num_microbatches: int = 0
    value_ns: int | None = None
    bound_ns: int | None = None
    peak_bytes: int | None = None
    refusal: str = ""

    @property
    def each_ns(self) -> float | None:
        """Time of the step divided by its microbatches, in ns."""
        return None if self.value_ns is None else self.value_ns / self.num_microbatches


def sweep(
    choices: Iterable[Choice],
    *,
    seconds_each: float = 2.0,
    seed: int = 0,
    observer: Callable[[int, Swept], None] | None = None,
) -> Iterator[Swept]:
    """Plan every choice.

    Parameters
    ----------
    choices
        What to plan.
    seconds_each
        Time limit of each plan in seconds.
    seed
        Decides all random choices.
    observer
        Called after each choice with how many are done and what came of it.

    Yields
    ------
    Swept
        In the order of the choices. A choice that cannot be, or that no order fits, says so and is no error.
        After Ctrl-C in a plan its best order so far is the last.

    Raises
    ------
    UsageError
        The time limit is no positive number.
    """
    if not seconds_each > 0:
        raise UsageError("a time limit is a positive number of seconds", given=seconds_each)
    for done, choice in enumerate(choices, 1):
        states: list[Progress] = []
        swept = _swept(choice, seconds_each, seed, states.append)
        if observer is not None:
            observer(done, swept)
        yield swept
        if states and states[-1].interrupted:
            return


def _swept(choice: Choice, seconds: float, seed: int, observer: Callable[[Progress], None]) -> Swept:
    problem = choice.problem
    if problem is None:
        return Swept(choice.words, refusal=choice.refusal)
    try:
        solution = plan(problem, time_limit_s=seconds, seed=seed, observer=observer)
    except (InfeasibleError, NoOrderError) as error:
        where = f" on {error.where}" if error.where else ""
        needed = f"; needs {error.needed} bytes{where}" if error.needed is not None else ""
        return Swept(choice.words, refusal=f"{error.what}{needed}")
    peak = max(simulate(solution.schedule, solution.problem).peak_bytes)
    certificate = solution.certificate
    return Swept(choice.words, problem.num_microbatches, certificate.value_ns, certificate.bound_ns, peak)


def best(rows: Sequence[Swept]) -> set[int]:
    """Return the places of the rows that no other beats: the Pareto front of time and memory.

    Compared are the time per microbatch and the bytes of the fullest rank. Of rows that are equal in both,
    the first one counts.
    """
    planned = [
        (row.each_ns, row.peak_bytes, place)
        for place, row in enumerate(rows)
        if row.each_ns is not None and row.peak_bytes is not None
    ]
    found, least = set(), None
    for _, held, place in sorted(planned):
        if least is None or held < least:
            found.add(place)
            least = held
    return found
