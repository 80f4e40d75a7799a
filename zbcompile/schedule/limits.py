"""What is too large to plan: every limit of the planner in one place, for the library and the commands.

A problem within these limits is planned within twice its time limit and two seconds of processor time, and
every number that comes of it can be written and read again.
"""

from __future__ import annotations

from collections import Counter

from zbcompile.errors import UsageError
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.memory import uses_of
from zbcompile.schedule.problem import Problem

__all__ = [
    "MAX_AMOUNT",
    "MOST_BLOCKING_CELLS",
    "MOST_BRANCHING_STAGES",
    "MOST_CELLS",
    "MOST_COMPARED_STAGES",
    "MOST_PIECES",
    "MOST_SEED",
    "MOST_STAGES",
    "check_amounts",
    "check_pieces",
    "check_plannable",
    "check_seed",
]

MAX_AMOUNT = (1 << 53) - 1
"""Largest integer in a file: beyond it, other JSON readers lose digits. As nanoseconds, 104 days."""

MOST_STAGES = 4096
"""Most stages of a problem that is planned."""

MOST_BRANCHING_STAGES = 512
"""Most stages where they branch or some edge has no gradient: bounds then look at all pairs of stages."""

MOST_PIECES = 512
"""Most pieces that stages are cut out of: bounds look at ways to take some neighbours of them."""

MOST_CELLS = 1 << 15
"""Most stages times microbatches (64 and 512): one order of so many takes a second to make and to judge."""

MOST_BLOCKING_CELLS = 1 << 14
"""The same under send modes that hold up the sender, where judging takes more than twice as long."""

MOST_COMPARED_STAGES = 1024
"""Most stages that are compared: every row takes a second or two by itself, whatever its time limit."""

MOST_SEED = (1 << 31) - 1
"""Largest seed: the solver keeps it in 32 bits."""

_MAX_HELD_BYTES = 1 << 61
"""Sums of bytes that 64 bits hold with room to spare."""


def check_plannable(problem: Problem, where: str = "") -> None:
    """Refuse a problem that is too large for any time limit of some seconds, or that does not add up.

    Parameters
    ----------
    where
        The file that states the problem.

    Raises
    ------
    UsageError
        Says which number is too large, and the most that is planned.
    """
    stages, count = problem.num_stages, problem.num_microbatches
    edges = problem.profile.edges
    branches = any(e.target != e.source + 1 or not e.has_gradient for e in edges) or len(edges) < stages - 1
    most = MOST_BRANCHING_STAGES if branches else MOST_STAGES
    if stages > most:
        raise UsageError(
            "too many stages to plan for" + (" where they are no plain chain" if branches else ""),
            where=where,
            needed=f"at most {most} stages",
            given=stages,
            fix="join neighbouring stages",
        )
    holding = problem.sends.holds_rank
    cells = MOST_BLOCKING_CELLS if holding else MOST_CELLS
    if stages * count > cells:
        raise UsageError(
            "too many stages times microbatches to plan for"
            + (f" under {problem.transport}" if holding else ""),
            where=where,
            needed=f"at most {cells}",
            given=f"{stages} x {count} = {stages * count}",
            fix="plan fewer microbatches, or join neighbouring stages",
        )
    for profile in problem.profiles():
        check_amounts(profile, count, where)


def check_pieces(pieces: Profile, where: str = "") -> None:
    """Refuse more pieces than stages are cut out of.

    Raises
    ------
    UsageError
        Says how many there are.
    """
    if pieces.num_stages > MOST_PIECES:
        raise UsageError(
            "too many pieces to cut",
            where=where,
            needed=f"at most {MOST_PIECES}",
            given=pieces.num_stages,
            fix="join neighbouring pieces",
        )


def check_seed(seed: int) -> None:
    """Refuse a seed that is no whole number from 0 to `MOST_SEED`.

    Raises
    ------
    UsageError
        It is none.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MOST_SEED:
        raise UsageError(
            "the seed is out of range", needed=f"a whole number from 0 to {MOST_SEED}", given=seed
        )


def check_amounts(profile: Profile, num_microbatches: int, where: str = "") -> None:
    """Refuse costs whose sum over a step is more than a file can say.

    The sum of all times and travel times is the length of a step in which nothing overlaps: no order that
    never waits without need is longer. So every time of every such order can be written, and be read again.

    Raises
    ------
    UsageError
        The costs are too large for the number of microbatches; names the sum.
    """
    work_ns = sum(max(map(_longest_ns, (stage, *stage.variants))) for stage in profile.stages)
    host_ns = 3 * profile.overhead_ns * profile.num_stages
    once_ns = sum(stage.unshard_ns + stage.reduce_ns + stage.update_ns for stage in profile.stages)
    total = num_microbatches * (work_ns + host_ns + _travel_ns(profile)) + once_ns
    if total > MAX_AMOUNT:
        raise UsageError(
            "the times are too large to add up",
            where=where,
            needed=f"all actions and messages of a step in at most {MAX_AMOUNT} ns",
            given=f"{total} ns",
            fix="give times in nanoseconds; 2^53 - 1 of them are 104 days",
        )
    held = num_microbatches * sum(
        max(uses_of(way).all_taken for way in (s, *s.variants)) for s in profile.stages
    )
    sets = num_microbatches + 1
    held += sum(stage.static_bytes + sets * stage.gradient_bytes for stage in profile.stages)
    if held > _MAX_HELD_BYTES:
        raise UsageError(
            "the bytes are too large to add up",
            where=where,
            needed=f"all that a step saves in at most {_MAX_HELD_BYTES} bytes",
            given=f"{held} bytes",
        )


def _longest_ns(way: StageCost) -> int:
    return way.forward_ns + max(way.backward_input_ns + way.backward_weight_ns, way.full_backward_ns)


def _travel_ns(profile: Profile) -> int:
    """Return the travel time of all messages of a microbatch, each over the slowest link."""
    links = {profile.link, *(link for _, link in profile.links)}
    forward, backward = (
        sum(max(link.transfer_ns(size) for link in links) * count for size, count in sizes.items())
        for sizes in (
            Counter(edge.forward_bytes for edge in profile.edges),
            Counter(edge.backward_bytes for edge in profile.edges if edge.has_gradient),
        )
    )
    return forward + backward
