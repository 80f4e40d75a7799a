"""A certificate in words: which bound it is, what forces the time, and its sum, derived again.

Bounds that can be added up by hand are derived here from the problem's own numbers
(`zbcompile.planner.certify.derive`). Bounds that a solver proved, or that are made of others, are told from
their witness; ``zbcompile check --certificate`` proves those again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zbcompile.errors import CheckError
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.planner.certify.derive import derivations
from zbcompile.planner.certify.facts import Derivation, Facts
from zbcompile.planner.certify.once_a_step import add_once_a_step
from zbcompile.schedule.limits import MAX_AMOUNT
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.renumber import Numbering
from zbcompile.schedule.simulate import Timeline
from zbcompile.show.units import TimeUnit, time_unit

__all__ = ["ProofWords", "proof_words"]

Witness = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ProofWords:
    """A certificate in words.

    Attributes
    ----------
    claim
        What is proved about the order, and how far from it the order may be.
    reason
        What forces the time.
    sum_lines
        The sum of the bound, a term a line; empty where it is not derived here.
    fault
        Why the certificate does not hold; None if it holds, or was not derived here.
    """

    claim: str
    reason: str
    sum_lines: tuple[str, ...] = ()
    fault: CheckError | None = None


def proof_words(file: ScheduleFile, timeline: Timeline) -> ProofWords | None:
    """Put the certificate of a file into words; None without one."""
    certificate, problem = file.certificate, file.problem
    if certificate is None or problem is None:
        return None
    unit = time_unit(timeline.makespan_ns)
    objective, value = certificate.objective, timeline.value_ns
    reason = _reason(certificate.method, certificate.witness, problem, unit)
    if certificate.value_ns != value:
        fault = CheckError(
            "the certificate speaks of another value",
            where="certificate",
            needed=f"{value} ns, as simulated",
            given=f"{certificate.value_ns} ns",
            fix="plan again",
        )
        return ProofWords("the file's certificate proves nothing about this order", reason, fault=fault)
    bound = unit.text(certificate.bound_ns)
    if certificate.is_optimal:
        claim = f"OPTIMAL: no order of this problem has a {objective} below {bound}"
    else:
        away = unit.text(value - certificate.bound_ns)
        claim = (
            f"{certificate.status}: no order has a {objective} below {bound}; this one has"
            f" {unit.text(value)}. A better one, by at most {away}, was neither found nor ruled out"
        )
    derive = derivations(objective).get(certificate.method)
    if derive is None and certificate.method in _REASONS:
        return ProofWords(
            f"{claim}. So says the file; `zbcompile check --certificate` proves it again", reason
        )
    out = Derivation()
    try:
        if derive is None:
            raise CheckError(f"unknown method {certificate.method[:40]!r}", where="certificate")
        numbering = Numbering.by_first_stage(problem.placement)
        witness = numbering.of_witness(certificate.witness)
        if not numbering.is_same:
            out.note(numbering.words)
        numbered = numbering.of_problem(problem)
        derive(Facts(numbered), witness, out)
        add_once_a_step(numbered, certificate.method, out)
        out.compare(witness)
        if out.total < certificate.bound_ns:
            raise CheckError(
                f"the {certificate.method} bound does not follow from its witness",
                where="certificate",
                needed=f"at least {certificate.bound_ns} ns",
                given=f"{out.total} ns",
                fix="plan again",
            )
    except CheckError as fault:
        return ProofWords("the certificate does not hold", reason, fault=fault)
    return ProofWords(claim, reason, (*out.lines, f"= {out.total:,} ns"))


def _reason(method: str, witness: Witness, problem: Problem, unit: TimeUnit) -> str:
    """Say what forces the time of a bound; the numbers are those of the witness."""
    telling = _REASONS.get(method)
    if telling is None:
        return f"the file names the method {method!r}, which says nothing here"
    numbers = _Numbers(witness, problem, unit)
    if not numbers.whole("once_a_step_ns"):
        return telling(numbers)
    beside = f"Beside F's, B's and W's, every order pays {numbers.time('once_a_step_ns')} once a step"
    return f"{telling(numbers)} {beside}: a gather, a reduction and the update."


class _Numbers:
    """The numbers of a witness, written for people; a number that is missing reads as ``?``."""

    def __init__(self, witness: Witness, problem: Problem, unit: TimeUnit) -> None:
        self.witness, self.problem, self.unit = witness, problem, unit

    def whole(self, name: str) -> int | None:
        value = self.witness.get(name)
        return value if type(value) is int and 0 <= value <= MAX_AMOUNT else None

    def count(self, name: str) -> str:
        value = self.whole(name)
        return "?" if value is None else str(value)

    def time(self, name: str) -> str:
        value = self.whole(name)
        return "?" if value is None else self.unit.text(value)

    def rows(self, name: str) -> Sequence[object]:
        value = self.witness.get(name)
        return value if isinstance(value, (list, tuple)) else ()

    def idle(self, rank: str) -> str:
        """Say what forces idle time on a rank, after a sentence about its work; empty if nothing does."""
        if not self.whole("idle_ns"):
            return ""
        windows = self.rows("windows")
        if windows:
            named = [row[0] for row in windows if isinstance(row, (list, tuple)) and row]
            first = ", ".join(str(number) for number in named[:4] if type(number) is int)
            more = f" and {len(windows) - 4} more" if len(windows) > 4 else ""
            return (
                f" Between F and B of a microbatch lie {self.time('round_trip_ns')}; memory lets rank {rank}"
                f" hold {self.count('microbatches_that_fit')} microbatches, which do not fill that time. In"
                f" the windows of microbatches {first}{more}, which do not overlap, it is idle for"
                f" {self.time('idle_ns')} together."
            )
        return f" At its start and end it is idle for {self.time('idle_ns')}, whatever the order."


def _work(n: _Numbers) -> str:
    rank = n.count("rank")
    return f"rank {rank} has {n.time('work_ns')} of work, one action after the other.{n.idle(rank)}"


def _enclosing_pair(n: _Numbers) -> str:
    outer, inner = n.count("outer_rank"), n.count("inner_rank")
    text = (
        f"the span of rank {outer} contains the way to rank {inner} ({n.time('way_there_ns')}), rank"
        f" {inner}'s work ({n.time('work_ns')}) and the way back ({n.time('way_back_ns')})"
    )
    if n.whole("trailing_weight_ns"):
        text += (
            f", less the W's that rank {inner} may leave behind its last B"
            f" ({n.time('trailing_weight_ns')}: memory holds back no more)"
        )
    return f"{text}.{n.idle(inner)}"


def _last_round_trip(n: _Numbers) -> str:
    inner = n.count("inner_rank")
    return (
        f"rank {inner}'s last F, of stage {n.count('last_forward')}, must come back as its last B, of stage"
        f" {n.count('last_backward')}, which takes {n.time('back_ns')}. What memory lets the rank run"
        f" meanwhile, and so the W's that it has left afterwards, is limited. Its work"
        f" ({n.time('work_ns')}), the idle time that this forces, and the ways there and back add up."
    )


def _warmup(n: _Numbers) -> str:
    return (
        "before its first B a rank runs whole F's, as many as memory allows, and waits for the first"
        " gradient. The round trips of all ranks depend on each other: with one ns less, on some rank the"
        " F's that fit leave more idle time than it has."
    )


def _area(n: _Numbers) -> str:
    return (
        f"every microbatch holds its bytes on rank {n.count('rank')} at least from F to the end of W. All"
        " bytes times their times, over the bytes that the rank has for them, is the least time."
    )


def _head(n: _Numbers) -> str:
    rank = n.count("rank")
    text = (
        f"rank {rank} cannot begin before the F's ahead of it are done ({n.time('head_ns')}), and has"
        f" {n.time('work_ns')} of work."
    )
    if n.whole("tail_ns") is not None:
        text += f" After its last B the gradient goes on to the end of the step ({n.time('tail_ns')})."
    return text + n.idle(rank)


def _one_microbatch(n: _Numbers) -> str:
    return f"one microbatch alone takes {n.time('path_ns')} through all stages and back."


def _blocking_send(n: _Numbers) -> str:
    inner = n.witness.get("of")
    inner = inner if isinstance(inner, str) and inner != "blocking_send" else ""
    text = _reason(inner, n.witness, n.problem, n.unit)
    return f"sends hold up their rank, so travel times count as part of every F and B. With these, {text}"


def _crossing(n: _Numbers) -> str:
    rank = n.whole("rank")
    who = "the whole chain" if rank is None else f"rank {rank} alone"
    return (
        "the forward and the backward wave can pass each other only at certain places. The solver CP-SAT"
        f" searched all orders of {who} under that rule and found none shorter."
    )


def _cp_sat(n: _Numbers) -> str:
    return "the solver CP-SAT searched all orders of the whole problem and found none shorter."


def _variants(n: _Numbers) -> str:
    return (
        f"for each of the {len(n.rows('levels'))} choices of variants on rank {n.count('rank')} a bound was"
        " found, with the cheapest variant of every other stage. The least of them holds for all."
    )


def _least_microbatch(n: _Numbers) -> str:
    inner, inside = n.witness.get("of"), n.witness.get("witness")
    text = ""
    if isinstance(inner, str) and inner != "least_microbatch" and isinstance(inside, Mapping):
        text = f" With these, {_reason(inner, inside, n.problem, n.unit)}"
    return f"every microbatch counts with the least of each cost that any of them has.{text}"


def _microbatch_work(n: _Numbers) -> str:
    rank, head = n.count("rank"), ""
    if n.whole("head_ns"):
        head = f", and cannot begin before the F's ahead of it are done ({n.time('head_ns')})"
    return f"rank {rank} has {n.time('work_ns')} of work, each microbatch at its own cost{head}."


def _longest_microbatch(n: _Numbers) -> str:
    who = n.count("microbatch")
    return f"microbatch {who} alone takes {n.time('path_ns')} through all stages and back."


_REASONS: Mapping[str, Callable[[_Numbers], str]] = {
    "work": _work,
    "memory_windows": _work,
    "start_end_idle": _work,
    "enclosing_pair": _enclosing_pair,
    "last_round_trip": _last_round_trip,
    "warmup": _warmup,
    "area": _area,
    "head_and_work": _head,
    "head_work_and_tail": _head,
    "one_microbatch": _one_microbatch,
    "blocking_send": _blocking_send,
    "crossing": _crossing,
    "cp_sat": _cp_sat,
    "variants": _variants,
    "least_microbatch": _least_microbatch,
    "microbatch_work": _microbatch_work,
    "longest_microbatch": _longest_microbatch,
}
