"""Reads what several commands take: caps and times with units, placements, profiles and schedules."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from zbcompile.cli.hf_config import config_profile, refuse_without_config
from zbcompile.cli.short_form import check_relative_caps, given_costs, short_profile
from zbcompile.errors import UsageError
from zbcompile.formats import problem_json, profile_json
from zbcompile.formats.amounts import TIME
from zbcompile.formats.detect import load_schedule
from zbcompile.formats.files import read_text
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.formats.streams import say
from zbcompile.schedule.ir import PLACEMENTS, Placement
from zbcompile.schedule.limits import MAX_AMOUNT, check_plannable
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.replay import JITTERS, Jitter
from zbcompile.schedule.speeds import on_ranks, speeds_of

if TYPE_CHECKING:
    from fractions import Fraction

__all__ = [
    "check_directory",
    "costs_of",
    "costs_where",
    "load_on_ranks",
    "load_problem",
    "load_profile",
    "load_scheduled",
    "parse_bytes",
    "parse_caps",
    "parse_jitter",
    "parse_placement",
    "parse_speeds",
    "parse_time",
    "where_of",
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
_CHANGED = ("cap", "transport", "accumulate", "kept_gradients")
"""Options of commands that read a schedule which change its problem."""

_ASKED = ("objective", "transport", "accumulate", "kept_gradients")
"""What a problem asks for beside costs and limits."""

_TIMES = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_NUMBER = re.compile(r"((?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:[eE][0-9]{1,2})?)\s*([^\W\d]*%?)")


def _number(text: str, what: str, example: str) -> tuple[Fraction, str]:
    from fractions import Fraction

    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text[:40]!r} is not {what}", fix=f"write it as {example}")
    return Fraction(match.group(1)), match.group(2)


def parse_bytes(text: str) -> int:
    """Read an amount of memory such as ``4GiB``, ``512MiB`` or ``8e9``, in bytes.

    Raises
    ------
    UsageError
        The text is no amount, or too large.
    """
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
    """Read the caps of ``--cap`` in bytes: one for all ranks, or one per rank in a comma list.

    ``Kp`` means static bytes + K * p * (M_B of the rank's stages), ``none`` no limit.

    Raises
    ------
    UsageError
        The count is wrong, or a word is no amount.
    """
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


def parse_microbatch_costs(text: str | None) -> tuple[MicrobatchCost, ...]:
    """Read ``1,1.3,.8x2``: per microbatch the factor of its times, and after an x that of its bytes.

    Raises
    ------
    UsageError
        A factor is no number from 0 to 1000.
    """
    costs = []
    for i, word in enumerate(text.split(",") if text is not None else ()):
        time, _, size = word.partition("x")
        try:
            costs.append(MicrobatchCost.of(time, size or "1"))
        except UsageError as error:
            where = f"--microbatch-costs, microbatch {i}"
            needed = "such as 1.3 or 1.3x2"
            raise UsageError(error.what, where=where, needed=needed, given=word[:40]) from None
    return tuple(costs)


def parse_time(text: str, whole_ns: int) -> int:
    """Read a time in ns, us, ms or s, or in per cent of the whole, and return it in ns.

    Raises
    ------
    UsageError
        The text is no time.
    """
    number, unit = _number(text, "a time", "20ms, 1.5s or 30%")
    if unit == "%":
        return int(number * whole_ns / 100)
    if unit not in _TIMES:
        raise UsageError(f"{unit[:20]!r} is no unit of time", needed="ns, us, ms, s or %")
    return int(number * _TIMES[unit])


def parse_jitter(text: str) -> Jitter:
    """Read what latencies are drawn from: ``5ms`` or ``exponential:5ms`` on the mean, or ``uniform:5ms``.

    Raises
    ------
    UsageError
        It is no time, or the distribution is not known.
    """
    kind, colon, time = text.rpartition(":")
    try:
        return Jitter(kind if colon else next(iter(JITTERS)), TIME.read(time.strip()))
    except UsageError as error:
        raise UsageError(
            error.what, where="--jitter", needed=error.needed, fix="write 5ms or uniform:5ms"
        ) from None


def parse_placement(text: str, num_stages: int) -> Placement:
    """Read a placement: ``linear``, ``looped:K``, ``v:K`` or the rank of every stage as ``0,1,1,0``.

    Raises
    ------
    UsageError
        The text is none of these, or does not fit the number of stages.
    """
    if text[:1].isdigit():
        words = text.split(",")
        if len(words) != num_stages or not all(w.strip().isascii() and w.strip().isdigit() for w in words):
            raise UsageError(
                "--placement lists the rank of every stage", needed=f"{num_stages} ranks", given=text[:60]
            )
        return Placement(tuple(int(w[:9]) for w in words))
    return problem_json.named_placement(text, num_stages)


def parse_speeds(text: str | None, num_ranks: int) -> tuple[int, ...]:
    """Read the speeds of ``--rank-speeds``, in millionths; empty where all are as profiled.

    Raises
    ------
    UsageError
        A word is no positive number, or there is not one per rank.
    """
    if text is None:
        return ()
    speeds = []
    for rank, word in enumerate(text.split(",")):
        try:
            speeds.append(float(word))
        except ValueError:
            raise UsageError(
                f"--rank-speeds: {word[:40]!r} is no number", where=f"rank {rank}", fix="write 1,1,0.5,1"
            ) from None
    return speeds_of(speeds, num_ranks)


def check_directory() -> None:
    """Refuse to run where the working directory is gone: torch's libraries end the process there.

    Raises
    ------
    UsageError
        It is gone.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"no working directory: {error.strerror}", fix="change to a folder that exists"
        ) from None


def where_of(path: str) -> str:
    """Return how messages name a file; ``-`` is standard input."""
    return "standard input" if path == "-" else path


def load_profile(path: str) -> ProfileFile:
    """Read a profile file; ``-`` is standard input.

    Raises
    ------
    FormatError
        The file is broken, foreign or out of bounds.
    """
    return profile_json.loads(read_text(path), where_of(path))


def costs_of(arguments: argparse.Namespace) -> ProfileFile:
    """Return the costs that a command was given: a profile file, options, or a configuration to count.

    Raises
    ------
    UsageError
        The file is broken, the options do not go together, or there is more than one of these, or none.
    """
    refuse_without_config(arguments)
    short = given_costs(arguments)
    given = [arguments.profile] * (arguments.profile is not None) + short[:1]
    given += ["--hf-config"] * (arguments.hf_config is not None)
    if len(given) > 1:
        raise UsageError(f"{given[1]} and {given[0][:60]} both state costs", fix="leave one of them out")
    if not given:
        raise UsageError(
            "there are no costs to plan for",
            needed="a profile; or --ranks, --f, --b and --w; or --hf-config and --device",
            fix="write for instance --ranks 8 --f 18.5ms --b 18.1ms --w 9.3ms",
        )
    if arguments.hf_config is not None:
        return config_profile(arguments)
    return short_profile(arguments) if short else load_profile(arguments.profile)


def costs_where(arguments: argparse.Namespace) -> str:
    """Return how messages name the costs."""
    return "the costs given" if arguments.profile is None else where_of(arguments.profile)


def load_problem(arguments: argparse.Namespace, file: ProfileFile | None = None) -> Problem:
    """Return the problem that a profile file and the options of `plan` and `compare` state; options win.

    Parameters
    ----------
    file
        The profile file, where it has been read.

    Raises
    ------
    UsageError
        The file is broken, or the options do not fit it.
    """
    file = file or costs_of(arguments)
    placement = _asked_placement(arguments, file)
    changed = placement is not None and file.placement not in (None, placement)
    capped = arguments.cap is not None
    if given_costs(arguments):
        check_relative_caps(arguments)
    problem = (replace(file, caps=()) if capped or (changed and len(file.caps) > 1) else file).problem(
        placement=placement,
        num_microbatches=arguments.microbatches,
        objective=arguments.objective,
        transport=arguments.transport,
        accumulate=arguments.accumulate,
        kept_gradients=arguments.kept_gradients,
        microbatch_costs=parse_microbatch_costs(arguments.microbatch_costs),
    )
    problem = _with_recompute(problem, getattr(arguments, "recompute", None), costs_where(arguments))
    check_plannable(problem, costs_where(arguments))
    return problem.with_(caps=parse_caps(arguments.cap, problem)) if capped else problem


def load_on_ranks(arguments: argparse.Namespace, file: ProfileFile | None = None) -> Problem:
    """Return the same with the times that stages take on ranks of ``--rank-speeds``; raises as it."""
    problem = load_problem(arguments, file)
    speeds = parse_speeds(arguments.rank_speeds, problem.num_ranks)
    return problem.with_(profile=on_ranks(problem.profile, problem.placement, speeds))


def _with_recompute(problem: Problem, choice: str | None, where: str) -> Problem:
    """Return the problem with or without the variants of its stages, as ``--recompute`` says."""
    offers = problem.profile.offers_variants
    if choice == "auto" and not offers:
        raise UsageError("--recompute auto has nothing to choose from: no stage offers variants", where=where)
    if choice == "none" and offers:
        return problem.with_(profile=problem.profile.choose((0,) * problem.num_stages))
    return problem


def _asked_placement(arguments: argparse.Namespace, file: ProfileFile) -> Placement | None:
    """Return the placement of ``--placement`` and ``--ranks``, or None; ``auto`` starts contiguous."""
    text, ranks, stages = arguments.placement, arguments.ranks, file.profile.num_stages
    if ranks is not None and ranks > stages:
        raise UsageError(f"{ranks} ranks cannot share {stages} stages", needed=f"at most {stages} ranks")
    if ranks is not None and text in PLACEMENTS:
        if stages % ranks:
            raise UsageError(
                f"{stages} stages do not divide evenly among {ranks} ranks", fix="use --placement auto"
            )
        text = f"{text}:{stages // ranks}"
    if text == "auto" or (text is None and ranks is not None):
        from zbcompile.planner.placements import contiguous

        own = file.placement.num_ranks if file.placement is not None else stages
        speeds = parse_speeds(getattr(arguments, "rank_speeds", None), ranks or own)
        return contiguous(Problem.of(file.profile), ranks or own, speeds)
    if text is None:
        return None
    placement = parse_placement(text, stages)
    if ranks is not None and placement.num_ranks != ranks:
        raise UsageError("--placement and --ranks differ", needed=f"{ranks} ranks", given=placement.num_ranks)
    return placement


def load_scheduled(arguments: argparse.Namespace, text: str | None = None) -> ScheduleFile:
    """Return the schedule that a command was given, under the costs and limits given.

    With ``--profile`` or an option of `_CHANGED` the file's certificate is dropped: it is about another
    problem.

    Parameters
    ----------
    text
        The text of the schedule, where it has been read.

    Raises
    ------
    UsageError
        The file is broken, or the options do not fit it.
    """
    path = arguments.schedule
    if [path, arguments.profile, getattr(arguments, "measured", None)].count("-") > 1:
        raise UsageError("standard input can be read only once", fix="give one of the files by name")
    file, remarks = load_schedule(read_text(path) if text is None else text, where_of(path))
    for remark in remarks:
        say("note:", remark)
    if arguments.profile is not None:
        file = _attached(file, load_profile(arguments.profile))
    if file.problem is None:
        for option in _CHANGED:
            if getattr(arguments, option) is not None:
                name = option.replace("_", "-")
                raise UsageError(f"--{name} needs costs", fix="give --profile PROFILE.json")
        return file
    if all(getattr(arguments, option) is None for option in _CHANGED):
        return file
    problem = file.problem
    if arguments.kept_gradients is not None:  # before the cap, which may be a part of what is held
        problem = problem.with_(kept_gradients=arguments.kept_gradients)
    if arguments.cap is not None:
        problem = problem.with_(caps=parse_caps(arguments.cap, problem))
    if arguments.transport is not None:
        problem = problem.with_(transport=arguments.transport)
    if arguments.accumulate is not None:
        problem = problem.with_(accumulate=arguments.accumulate)
    return replace(file, problem=problem, certificate=None)


def _attached(file: ScheduleFile, profile: ProfileFile) -> ScheduleFile:
    """Return an order under a profile: the order's placement and number of microbatches win.

    The objective, the send mode and the way gradients are summed are the profile's where it states them, else
    those of the problem that the order was planned for. Caps are the profile's or none: bytes of other costs
    say nothing. Where the profile offers variants, those that the file names are chosen, else the stages
    themselves.
    """
    schedule, variants, offered = file.schedule, file.variants, None
    problem_json.check_amount(profile.profile, schedule.num_microbatches, "--profile")
    stated = replace(profile, placement=None, num_microbatches=None)
    if file.problem is not None:
        asked = {name: getattr(file.problem, name) for name in _ASKED if getattr(profile, name) is None}
        stated = replace(stated, **asked)
    problem = stated.problem(placement=schedule.placement, num_microbatches=schedule.num_microbatches)
    if profile.profile.offers_variants:
        offered, variants = profile.profile, variants or (0,) * problem.num_stages
        problem = problem.with_(profile=offered.choose(variants))
    else:
        variants = ()
    return replace(file, problem=problem, certificate=None, variants=variants, offered=offered)
