"""Reads the changes of ``explain --what-if``, and makes the usual ones where none is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from zbcompile.cli.inputs import parse_bytes, parse_placement, parse_time
from zbcompile.errors import UsageError
from zbcompile.formats.problem_json import named_placement
from zbcompile.schedule.ir import PLACEMENTS
from zbcompile.schedule.limits import MAX_AMOUNT, check_plannable
from zbcompile.schedule.problem import Problem

if TYPE_CHECKING:
    from zbcompile.planner.changes import Change

__all__ = ["CHANGES_HELP", "read_changes", "usual_changes"]

CHANGES_HELP = (
    "plan the step with a change: memory=+20%%, +1 (microbatches), +2GiB, least or none; link=2x, +10ms, "
    "2-3:2x or 2-3:+10ms; split=all, none or rule; placement=v; microbatches=+1; barrier=step or none. May "
    "be repeated; without a value, the usual ones"
)

_UNITS = ((10**9, "s"), (10**6, "ms"), (10**3, "us"), (1, "ns"))
_PERCENT = re.compile(r"\+([0-9]{1,6}(?:\.[0-9]{1,6})?)%")
_COUNT = re.compile(r"\+([0-9]{1,7})")
_FACTOR = re.compile(r"([0-9]{1,6})x")
_PAIR = re.compile(r"([0-9]{1,7})-([0-9]{1,7})")


def read_changes(texts: Sequence[str], problem: Problem) -> list[Change]:
    """Read changes.

    Raises
    ------
    UsageError
        One of them is no change, or changes nothing here.
    """
    return [_read(text, problem) for text in texts]


def _read(text: str, problem: Problem) -> Change:
    name, equals, value = text.partition("=")
    reader = _READERS.get(name)
    if reader is None or not equals:
        raise UsageError(
            f"{text[:40]!r} is no change",
            needed="memory=, link=, split=, placement=, microbatches= or barrier=",
            fix="write the schedule first: zbcompile explain plan.json --what-if memory=+20%",
        )
    change = reader(value, problem)
    check_plannable(change.problem, f"--what-if {text[:40]}")
    return change


def _wrong(name: str, value: str, needed: str) -> UsageError:
    return UsageError(f"{name}={value[:40]} is no change", needed=f"{name}= and {needed}")


def _memory(value: str, problem: Problem) -> Change:
    from zbcompile.planner import changes

    if value == "least":
        return changes.at_least_caps(problem)
    if value == "none":
        return changes.without_caps(problem)
    share, count = _PERCENT.fullmatch(value), _COUNT.fullmatch(value)
    if count is not None:
        return changes.more_activations(problem, int(count.group(1)))
    if share is not None:
        factor = 1 + Fraction(share.group(1)) / 100
        return changes.more_memory(
            problem, f"{share.group(1)} % more memory", lambda cap: _bounded(int(cap * factor))
        )
    if not value.startswith("+"):
        raise _wrong("memory", value, "+20%, +1, +2GiB, least or none")
    more = parse_bytes(value[1:])
    return changes.more_memory(problem, f"{value[1:]} more memory", lambda cap: _bounded(cap + more))


def _bounded(value: int) -> int:
    if value > MAX_AMOUNT:
        raise UsageError("this is too much memory", needed=f"at most {MAX_AMOUNT} bytes", given=value)
    return value


def _link(value: str, problem: Problem) -> Change:
    from zbcompile.planner import changes

    which, colon, how = value.rpartition(":")
    pair = None
    if colon:
        match = _PAIR.fullmatch(which)
        if match is None:
            raise _wrong("link", value, "the two ranks as 2-3")
        pair = int(match.group(1)), int(match.group(2))
        if max(pair) >= problem.num_ranks or pair[0] == pair[1]:
            raise UsageError(
                f"there is no link {which}", needed=f"two of the ranks 0 to {problem.num_ranks - 1}"
            )
    factor = _FACTOR.fullmatch(how)
    if factor is not None and int(factor.group(1)) > 1:
        return changes.faster_link(problem, int(factor.group(1)), pair)
    if not how.startswith("+"):
        raise _wrong("link", value, "2x, +10ms, 2-3:2x or 2-3:+10ms")
    return changes.slower_link(problem, parse_time(how[1:], 0), how[1:], pair)


def _split(value: str, problem: Problem) -> Change:
    from zbcompile.planner import changes

    makers: dict[str, Callable[[Problem], Change]] = {
        "all": changes.all_split,
        "none": changes.all_fused,
        "rule": changes.by_rule_of_thumb,
    }
    if value not in makers:
        raise _wrong("split", value, "all, none or rule")
    return makers[value](problem)


def _placement(value: str, problem: Problem) -> Change:
    from zbcompile.planner import changes

    stages, ranks = problem.num_stages, problem.num_ranks
    name, _, per_rank = value.partition(":")
    if name in PLACEMENTS and not per_rank:
        halves = name != "linear" and stages == ranks
        count = 2 * stages if halves else stages
        text = f"{name}:{count // ranks}" if name != "linear" and count % ranks == 0 else name
        return changes.placed(problem, name, named_placement(text, count))
    return changes.placed(problem, value[:20], parse_placement(value, stages))


def _microbatches(value: str, problem: Problem) -> Change:
    from zbcompile.planner import changes

    match = _COUNT.fullmatch(value)
    if match is None or int(match.group(1)) < 1:
        raise _wrong("microbatches", value, "+1")
    return changes.more_microbatches(problem, int(match.group(1)))


def _barrier(value: str, problem: Problem) -> Change:
    from zbcompile.planner import changes

    kind, colon, snapshot = value.partition(":")
    if value == "step":
        return changes.with_barrier(problem)
    if kind != "none":
        raise _wrong("barrier", value, "step, none or none:2GiB")
    return changes.without_barrier(problem, parse_bytes(snapshot) if colon else None)


_READERS: dict[str, Callable[[str, Problem], Change]] = {
    "memory": _memory,
    "link": _link,
    "split": _split,
    "placement": _placement,
    "microbatches": _microbatches,
    "barrier": _barrier,
}


def usual_changes(problem: Problem, value_ns: int, crossed: tuple[int, int] | None) -> Iterator[Change]:
    """Yield the usual changes, without those that change nothing here.

    Parameters
    ----------
    value_ns
        Value of the order: a slow link is slower by about a hundredth of it.
    crossed
        The link that the critical path crosses most often; None if it crosses none.
    """
    texts = ["memory=+1", "memory=+20%", "link=2x"]
    if crossed is not None:
        texts.append(f"link={crossed[0]}-{crossed[1]}:+{_round(value_ns // 100)}")
    texts += ["split=all", "split=none", "split=rule"]
    texts += [f"placement={name}" for name in PLACEMENTS]
    texts += ["microbatches=+1", "barrier=step", "barrier=none"]
    for text in texts:
        try:
            change = _read(text, problem)
        except UsageError:
            continue
        if change.problem != problem or text.startswith("split"):
            yield change


def _round(time_ns: int) -> str:
    """Write the least round time (1, 2 or 5 times a power of ten) that is no shorter, at least 1 ns."""
    power = 10 ** (len(str(max(1, time_ns))) - 1)
    size = next(k * power for k in (1, 2, 5, 10) if k * power >= time_ns)
    length, name = next((n, name) for n, name in _UNITS if size % n == 0)
    return f"{size // length}{name}"
