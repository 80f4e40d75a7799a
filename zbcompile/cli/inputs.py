"""Reading what commands share: caps and times with units, placements, and schedules with their problem."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from zbcompile.errors import UsageError
from zbcompile.formats import profile_json
from zbcompile.formats.detect import load_schedule
from zbcompile.formats.fields import MAX_AMOUNT
from zbcompile.formats.files import read_text
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate

if TYPE_CHECKING:
    from fractions import Fraction

__all__ = [
    "load_problem",
    "load_profile",
    "load_scheduled",
    "parse_caps",
    "parse_placement",
    "parse_time",
    "say",
]

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_TIMES = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?(?:[eE][0-9]{1,2})?)\s*([^\W\d]*%?)")


def say(*words: object) -> None:
    """Talk: a line on standard error."""
    print(*words, file=sys.stderr, flush=True)


def _number(text: str, what: str, example: str) -> tuple[Fraction, str]:
    from fractions import Fraction

    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text[:40]!r} is not {what}", fix=f"write it as {example}")
    return Fraction(match.group(1)), match.group(2)


def parse_bytes(text: str) -> int:
    """An amount of memory: ``4GiB``, ``512MiB``, ``8e9``."""
    number, unit = _number(text, "an amount of memory", "4GiB, 512MiB or 8e9")
    return _bytes(number, unit)


def _bytes(number: Fraction, unit: str) -> int:
    if unit.lower() not in _UNITS:
        raise UsageError(
            f"{unit[:20]!r} is no unit of memory", needed="B, KiB, MiB, GiB, TiB, kB, MB, GB, TB or p"
        )
    return _bounded(int(number * _UNITS[unit.lower()]))


def _bounded(value: int) -> int:
    if value > MAX_AMOUNT:
        raise UsageError("this is too much memory", needed=f"at most {MAX_AMOUNT} bytes", given=value)
    return value


def parse_caps(text: str, problem: Problem) -> tuple[int | None, ...]:
    """Caps per rank from ``--cap``; ``Kp`` is static bytes + K * p * (M_B of the rank's stages)."""
    words = text.split(",")
    if len(words) == 1:
        words *= problem.num_ranks
    if len(words) != problem.num_ranks:
        raise UsageError("--cap gives one value, or one per rank", needed=problem.num_ranks, given=len(words))
    return tuple(_cap(word, problem, rank) for rank, word in enumerate(words))


def _cap(text: str, problem: Problem, rank: int) -> int | None:
    if text.strip().lower() == "none":
        return None
    number, unit = _number(text, "an amount of memory", "4GiB, 512MiB, 8e9, 1.5p or none")
    if unit.lower() != "p":
        return _bytes(number, unit)
    saved = sum(problem.profile.stages[s].saved_bytes for s in problem.placement.stages_of(rank))
    return _bounded(problem.static_bytes(rank) + int(number * problem.num_ranks * saved))


def parse_time(text: str, whole_ns: int) -> int:
    """A time from ``--from`` or ``--to``: ns, us, ms, s, or per cent of the step."""
    number, unit = _number(text, "a time", "20ms, 1.5s or 30%")
    if unit == "%":
        return int(number * whole_ns / 100)
    if unit not in _TIMES:
        raise UsageError(f"{unit[:20]!r} is no unit of time", needed="ns, us, ms, s or %")
    return int(number * _TIMES[unit])


def parse_placement(text: str, num_stages: int) -> Placement:
    """``linear``, ``looped:K``, ``v:K`` or ``0,1,1,0``."""
    if text[:1].isdigit():
        words = text.split(",")
        if len(words) != num_stages or not all(w.strip().isascii() and w.strip().isdigit() for w in words):
            raise UsageError(
                "--placement lists the rank of every stage", needed=f"{num_stages} ranks", given=text[:60]
            )
        return Placement(tuple(int(w[:9]) for w in words))
    return profile_json.named_placement(text, num_stages)


def load_profile(path: str) -> ProfileFile:
    """A profile file. Raises `FormatError`."""
    return profile_json.loads(read_text(path), "standard input" if path == "-" else path)


def load_problem(arguments: argparse.Namespace) -> Problem:
    """The problem of a profile file and the options of `plan` and `compare`; options win."""
    file = load_profile(arguments.profile)
    placement = _asked_placement(arguments, file)
    changed = placement is not None and file.placement not in (None, placement)
    problem = (replace(file, caps=()) if arguments.cap or (changed and len(file.caps) > 1) else file).problem(
        placement=placement,
        num_microbatches=arguments.microbatches,
        objective=arguments.objective,
        transport=arguments.transport,
    )
    profile_json.check_amount(problem.profile, problem.num_microbatches, arguments.profile)
    return problem.with_(caps=parse_caps(arguments.cap, problem)) if arguments.cap else problem


def _asked_placement(arguments: argparse.Namespace, file: ProfileFile) -> Placement | None:
    """What ``--placement`` and ``--ranks`` say; None when they say nothing. ``auto`` begins contiguous."""
    text, ranks, stages = arguments.placement, arguments.ranks, file.profile.num_stages
    if ranks is not None and ranks > stages:
        raise UsageError(f"{ranks} ranks cannot share {stages} stages", needed=f"at most {stages} ranks")
    if ranks is not None and text in ("linear", "looped", "v"):
        if stages % ranks:
            raise UsageError(
                f"{stages} stages do not divide evenly among {ranks} ranks", fix="use --placement auto"
            )
        text = f"{text}:{stages // ranks}"
    if text == "auto" or (text is None and ranks is not None):
        from zbcompile.planner.placements import contiguous

        own = file.placement.num_ranks if file.placement is not None else stages
        return contiguous(Problem.of(file.profile), ranks or own)
    if text is None:
        return None
    placement = parse_placement(text, stages)
    if ranks is not None and placement.num_ranks != ranks:
        raise UsageError("--placement and --ranks differ", needed=f"{ranks} ranks", given=placement.num_ranks)
    return placement


def load_scheduled(arguments: argparse.Namespace) -> ScheduleFile:
    """The schedule that `show`, `check` or `convert` was given, under the costs and limits given."""
    path = arguments.schedule
    file, remarks = load_schedule(read_text(path), "standard input" if path == "-" else path)
    for remark in remarks:
        say("note:", remark)
    if arguments.profile:
        file = replace(
            file, problem=_attached(file, load_profile(arguments.profile)), certificate=None, variants=()
        )
    if file.problem is None:
        if arguments.cap:
            raise UsageError("--cap needs costs", fix="give --profile PROFILE.json")
        return file
    changes: dict[str, object] = {}
    if arguments.cap:
        changes["caps"] = parse_caps(arguments.cap, file.problem)
    if arguments.transport:
        changes["transport"] = arguments.transport
    return replace(file, problem=file.problem.with_(**changes), certificate=None) if changes else file


def _attached(file: ScheduleFile, profile: ProfileFile) -> Problem:
    """A profile under an order: the order's own placement and number of microbatches."""
    schedule = file.schedule
    profile_json.check_amount(profile.profile, schedule.num_microbatches, "--profile")
    return replace(profile, placement=None, num_microbatches=None).problem(
        placement=schedule.placement, num_microbatches=schedule.num_microbatches
    )


def value_of(file: ScheduleFile) -> int | None:
    """Span or makespan of a schedule with a problem, in ns."""
    return None if file.problem is None else simulate(file.schedule, file.problem).value_ns
