"""The short form of a profile: what stages cost, on the command line.

``--ranks 8 --f 18.5ms --b 18.1ms --w 9.3ms --comm 0.6ms --activation 2GiB``: one value for what every rank
has, or a comma list with one per stage. Where a rank has several stages they share its value equally, so that
the same step is compared under all placements.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

from zbcompile.cli.shared_options import words
from zbcompile.errors import UsageError
from zbcompile.formats.amounts import SIZE, TIME, has_unit
from zbcompile.formats.problem_json import MAX_STAGES
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import PLACEMENTS
from zbcompile.schedule.limits import MAX_AMOUNT

__all__ = ["COSTS", "add_cost_options", "check_relative_caps", "dealt", "given_costs", "short_profile"]

COSTS = ("f", "b", "w", "bw", "comm", "activation", "weight_activation", "static")
_NEEDED = ("f", "b", "w")
_ONE = 1 << 10
"""Bytes that stand for the activations of one microbatch where no bytes are given."""

_RELATIVE = f"memory in activations: {_ONE} bytes stand for a factor of 1"
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?|\.[0-9]{1,9}")


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that state costs in place of a profile file."""
    group = parser.add_argument_group(
        "costs without a profile",
        "In place of the file, with --ranks: one value for every rank, which its stages share equally, or a "
        "comma list with one per stage. Without bytes --activation is 1 and memory counts in activations: "
        "caps are then written as 1.5p.",
    )
    rows = (
        ("--f", "T", "time of F: 18.5ms"),
        ("--b", "T", "time of B, the gradient of the stage's inputs"),
        ("--w", "T", "time of W, the gradient of its parameters"),
        ("--bw", "T", "time of both fused (B + W)"),
        ("--comm", "T", "latency of every message (0ns)"),
        ("--activation", "BYTES", "what a microbatch holds from F to B: 2GiB, or a factor (1)"),
        (
            "--weight-activation",
            "BYTES",
            "what it holds from B to W: 1GiB, or as a share of --activation (1)",
        ),
        ("--static", "BYTES", "what is held all the time: weights, gradients, optimizer state (0)"),
    )
    for name, kind, text in rows:
        group.add_argument(name, type=words, metavar=kind, help=text)


def given_costs(arguments: argparse.Namespace) -> list[str]:
    """Return the options that state costs."""
    given = [name for name in COSTS if getattr(arguments, name) is not None]
    return [f"--{name.replace('_', '-')}" for name in given]


def short_profile(arguments: argparse.Namespace) -> ProfileFile:
    """Return the profile that the options state.

    Raises
    ------
    UsageError
        A cost is missing or no amount, lists have different lengths, or the number of stages is not known.
    """
    for name in _NEEDED:
        if getattr(arguments, name) is None:
            raise UsageError(f"--{name} is missing", needed="the times of F, B and W: --f, --b, --w")
    shares = _shares(arguments)
    count = len(shares)
    times = {name: _each(arguments, name, shares, TIME.read) for name in ("f", "b", "w")}
    fused = _each(arguments, "bw", shares, TIME.read)
    saved = _each(arguments, "activation", shares, _size, "1") or ()
    waiting = _waiting(arguments, shares, saved)
    static = _each(arguments, "static", shares, _size, "0B") or ()
    stages = tuple(
        StageCost(f, b, w, b + w if fused is None else fused[s], m_b, m_w, held)
        for s, (f, b, w, m_b, m_w, held) in enumerate(
            zip(*(times[name] or () for name in ("f", "b", "w")), saved, waiting, static, strict=True)
        )
    )
    comm = 0 if arguments.comm is None else _read("comm", arguments.comm, TIME.read)
    said = "; ".join(filter(None, ("given on the command line", _RELATIVE if _relative(arguments) else "")))
    edges = tuple(Edge(s, s + 1) for s in range(count - 1))
    return ProfileFile(Profile(stages, edges, Link(comm), source=said))


def check_relative_caps(arguments: argparse.Namespace) -> None:
    """Refuse a cap in bytes where memory counts in activations.

    Raises
    ------
    UsageError
        Names the cap.
    """
    for word in (arguments.cap or "").split(",") if _relative(arguments) else ():
        if word.strip() and not word.strip().lower().endswith(("p", "none")):
            raise UsageError(
                "a cap in bytes says nothing here: no activations are given in bytes",
                where="--cap",
                given=word[:40],
                fix="write it as 1.5p, or give --activation in bytes",
            )


def _relative(arguments: argparse.Namespace) -> bool:
    """Return whether memory counts in activations; raises `UsageError` where bytes are mixed in."""
    given = (arguments.activation or "1").split(",")
    if len({has_unit(word) for word in given}) > 1:
        raise UsageError("--activation mixes bytes and factors", given=arguments.activation[:60])
    relative = not has_unit(given[0])
    for name in ("weight_activation", "static"):
        for word in (getattr(arguments, name) or "").split(","):
            unit = has_unit(word) if word else relative
            if relative and word and unit:
                raise UsageError(
                    f"--{name.replace('_', '-')} is in bytes, --activation is not",
                    given=word[:40],
                    fix="give --activation in bytes as well",
                )
            if not relative and name == "static" and word and not unit:
                raise UsageError("--static has no unit", given=word[:40], needed=SIZE.names)
    return relative


def _shares(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """Return per stage how many stages its rank has, and how many of them come before it.

    Where a list gives each stage its own costs nothing is shared: (1, 0).
    """
    lengths = {
        name: len(getattr(arguments, name).split(","))
        for name in COSTS
        if name != "comm" and getattr(arguments, name) is not None
    }
    lists = {name: length for name, length in lengths.items() if length > 1}
    if len(set(lists.values())) > 1:
        raise UsageError(
            "the lists of costs have different lengths",
            given=", ".join(f"--{name.replace('_', '-')}: {length}" for name, length in lists.items()),
        )
    if lists:
        return [(1, 0)] * next(iter(lists.values()))
    if getattr(arguments, "stages", None) is not None:
        raise UsageError(
            "--stages joins pieces, and one value for all says nothing of pieces",
            fix="write --placement v:2 for two stages per rank, or a list with the costs of every piece",
        )
    if arguments.ranks is None and not (arguments.placement or "")[:1].isdigit():
        raise UsageError("--ranks is missing", needed="how many ranks there are, or a list of costs")
    return dealt(arguments.ranks, arguments.placement)


def dealt(ranks: int | None, placement: str | None) -> list[tuple[int, int]]:
    """Return per stage how many stages its rank has, and how many of them come before it.

    Parameters
    ----------
    ranks
        How many there are; not looked at where the placement lists them.
    placement
        As it was written, linear if left out. The number of stages follows from it.

    Raises
    ------
    UsageError
        There are too many stages.
    """
    text = placement or "linear"
    if text[:1].isdigit():
        given = text.split(",")[:MAX_STAGES]
        return [(given.count(rank), given[:s].count(rank)) for s, rank in enumerate(given)]
    name, _, tail = text.partition(":")
    each = int(tail) if tail.isascii() and tail.isdigit() and len(tail) < 5 else 1 + (not tail)
    each = each if name in PLACEMENTS and name != "linear" else 1
    every = ranks or 1
    count = every * each
    if not 0 < count <= MAX_STAGES:
        raise UsageError("too many stages", needed=f"1 to {MAX_STAGES}", given=count)
    return [(each, s // every) for s in range(count)]


def _each(
    arguments: argparse.Namespace,
    name: str,
    shares: Sequence[tuple[int, int]],
    read: Callable[[str], int],
    default: str | None = None,
) -> list[int] | None:
    """Return one value per stage, the shares of one value or those of a list; None where none is given."""
    text = getattr(arguments, name) or default
    if text is None:
        return None
    found = [_read(name, word, read) for word in text.split(",")]
    return [(found[0] + before) // all_ for all_, before in shares] if len(found) == 1 else found


def _waiting(
    arguments: argparse.Namespace, shares: Sequence[tuple[int, int]], saved: Sequence[int]
) -> Sequence[int]:
    """Return what each stage holds from B to W; bare numbers are shares of what it holds before."""
    text = arguments.weight_activation or "1"
    if any(map(has_unit, text.split(","))):
        return _each(arguments, "weight_activation", shares, SIZE.read) or ()
    parts = text.split(",") * (len(saved) if "," not in text else 1)
    return [
        _read("weight_activation", word, partial(_times, size=held))
        for word, held in zip(parts, saved, strict=True)
    ]


def _size(word: str) -> int:
    return SIZE.read(word) if has_unit(word) else _times(word, _ONE)


def _times(word: str, size: int) -> int:
    if not _NUMBER.fullmatch(word):
        raise UsageError(f"{word[:40]!r} is no factor", fix="write it as 1, 0.5 or 2GiB")
    exact = Fraction(word) * size
    if exact > MAX_AMOUNT:
        raise UsageError(f"{word[:40]} is too much", needed=f"at most {MAX_AMOUNT} bytes")
    return -(-exact.numerator // exact.denominator)


def _read(name: str, word: str, read: Callable[[str], int]) -> int:
    """Read one value; what is wrong with it names the option."""
    try:
        return read(word.strip())
    except UsageError as error:
        where = f"--{name.replace('_', '-')}"
        raise UsageError(error.what, where=where, needed=error.needed, fix=error.fix) from None
