"""Emit an order as one readable Python program per rank. The emitted text is what runs.

``order with communication --> one text per rank``. Contract in: `zbcompile.schedule.check` has passed.
Contract out: the program of rank r does the actions of ``schedule.order[r]`` in that order and nothing else,
then waits for its sends and reduces its gradients. Stretches that repeat with other microbatches become loops
(`fold`)::

    1F0 1B0 1W0 1F1 1B1 1W1 1F2 ...   -->   for i in range(3): forward(1, i); backward_input(1, i); ...

A verb that may have to wait is a generator, called with ``yield from``; it yields the message that it waits
for. So the same text runs in one process, where ranks take turns, and with one process per rank.

The verbs of a stage as a whole start something and do not wait, so they are plain calls with the stage alone:
``rank.unshard(2)`` begins to gather parameters, and the first forward of stage 2 waits for them;
``rank.reduce_grad(2)`` begins to reduce gradients, and ``reduce_gradients`` at the step's end waits for that;
``rank.reshard(2)`` lets the gathered parameters go.

Nothing but words of this file and integers reaches the text, whatever file the schedule came from. No torch
is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbcompile.errors import UsageError
from zbcompile.passes.lower.fold import Loop, fold
from zbcompile.schedule.held_gradients import gradients_words
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.semantics import SendMode
from zbcompile.schedule.simulate import Timeline, simulate
from zbcompile.schedule.solution import Certificate

__all__ = ["emit"]

_VERBS = {
    Kind.FORWARD: "yield from rank.forward",
    Kind.BACKWARD_INPUT: "yield from rank.backward_input",
    Kind.BACKWARD_WEIGHT: "rank.backward_weight",
    Kind.FULL_BACKWARD: "yield from rank.full_backward",
    Kind.SEND_F: "yield from rank.send_forward",
    Kind.RECV_F: "rank.recv_forward",
    Kind.SEND_B: "yield from rank.send_backward",
    Kind.RECV_B: "rank.recv_backward",
    Kind.UNSHARD: "rank.unshard",
    Kind.RESHARD: "rank.reshard",
    Kind.REDUCE_GRAD: "rank.reduce_grad",
}


def emit(
    schedule: Schedule,
    problem: Problem,
    certificate: Certificate | None = None,
    send_slots: int | None = None,
) -> tuple[str, ...]:
    """Return the program of every rank; the same arguments give the same bytes.

    Parameters
    ----------
    schedule, problem
        The order with its communication, and what it is for.
    certificate
        Its bound goes into the header.
    send_slots
        Messages that may be on their way per channel before the sender waits; None: any number.

    Raises
    ------
    UsageError
        Stages on different ranks have an edge, and the order has no messages.
    """
    if not schedule.has_communication and _crosses_ranks(problem):
        raise UsageError("a program needs its sends and receives", fix="run insert_comm first")
    timeline, ranks = simulate(schedule, problem), range(schedule.num_ranks)
    return tuple(_program(rank, timeline, certificate, send_slots) for rank in ranks)


def _crosses_ranks(problem: Problem) -> bool:
    rank_of = problem.placement.rank_of
    return any(rank_of[edge.source] != rank_of[edge.target] for edge in problem.profile.edges)


def _program(rank: int, timeline: Timeline, certificate: Certificate | None, send_slots: int | None) -> str:
    schedule = timeline.schedule
    stages = schedule.placement.stages_of(rank)
    lines = [
        *_header(rank, timeline, certificate),
        "",
        f"RANK = {rank}",
        f"STAGES = {stages}",
        f"MICROBATCHES = {schedule.num_microbatches}",
        f"SEND_SLOTS = {send_slots}",
        "",
        "",
        "def program(rank):",
    ]
    row, sends = schedule.order[rank], timeline.problem.sends
    lines += [f"    {line}" for line in _body(_with_settles(row, sends), _settle(sends))]
    lines += ["    # end of the step", "    yield from rank.wait_sent()"]
    lines += ["    yield from rank.reduce_gradients()", ""]
    return "\n".join(lines)


def _header(rank: int, timeline: Timeline, certificate: Certificate | None) -> list[str]:
    schedule, problem = timeline.schedule, timeline.problem
    stages = schedule.placement.stages_of(rank)
    objective = problem.objective
    words = "stage" if len(stages) == 1 else "stages"
    lines = [
        f'"""Rank {rank} of {schedule.num_ranks}: {words} {", ".join(map(str, stages))} of '
        f"{schedule.num_stages}, {schedule.placement.name} placement, "
        f"{schedule.num_microbatches} microbatches.",
        "",
        f"{objective} {_ms(timeline.value_ns)}, bubble {100 * timeline.bubble():.1f} % of it; "
        f"this rank works {_ms(timeline.busy_ns(rank))}",
    ]
    peak, cap = timeline.peak_bytes[rank], problem.caps[rank]
    lines.append(f"peak {_bytes(peak)}" + ("" if cap is None else f" of {_bytes(cap)} allowed"))
    if gradients := gradients_words(schedule, problem, rank):
        lines.append(gradients)
    if certificate is not None:
        lines.append(f"lower bound {_ms(certificate.bound_ns)}: {certificate.status}")
    return [*lines, '"""']


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f} ms"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _with_settles(row: Sequence[Action], sends: SendMode) -> list[Action | None]:
    """Return the row with None wherever the send mode holds the rank until what it posted is done."""
    result: list[Action | None] = []
    open_posts: list[int] = []
    for position, action in enumerate([*row, None]):
        if action is None or action.kind in sends.waits_before:
            due, open_posts = sends.due(open_posts)
            result += [None] if due else []
        if action is not None:
            result.append(action)
            open_posts += [position] if action.kind in sends.awaited else []
    return result


def _settle(sends: SendMode) -> str:
    """Return the line that waits for the posts that are due."""
    return f"yield from rank.{sends.settle_verb}({sends.under_way or ''})"


def _body(row: list[Action | None], settle: str) -> list[str]:
    pieces = fold(row)
    loops = [piece for piece in pieces if isinstance(piece, Loop)]
    if not loops:
        return [_line(item, settle) for item in row]
    main = max(loops, key=lambda loop: (loop.saved, len(loop.body)))
    lines, seen = [], False
    if pieces[0] is not main:
        lines.append("# warm-up")
    for k, piece in enumerate(pieces):
        if not isinstance(piece, Loop):
            lines.append(_line(piece, settle))
            continue
        if piece is main and not seen:
            lines.append(f"# steady state: {len(piece.body)} actions, {piece.count} times")
        lines += _loop(piece, settle)
        if piece is main and not seen:
            seen = True
            if k + 1 < len(pieces):
                lines.append("# cool-down")
    return lines


def _loop(loop: Loop, settle: str) -> list[str]:
    actions = [a for a in loop.body if a is not None]
    lead = next((a for a in actions if a.kind is Kind.FORWARD), actions[0])
    first = lead.microbatch
    end = first + loop.count * loop.step
    step = "" if loop.step == 1 else f", {loop.step}"
    start = "" if first == 0 and not step else f"{first}, "
    lines = [f"for i in range({start}{end}{step}):"]
    for action in loop.body:
        if action is None:
            lines.append(f"    {settle}")
        else:
            offset = action.microbatch - first
            word = "i" if offset == 0 else f"i {'+' if offset > 0 else '-'} {abs(offset)}"
            lines.append(f"    {_call(action, word)}")
    return lines


def _line(action: Action | None, settle: str) -> str:
    return settle if action is None else _call(action, str(action.microbatch))


def _call(action: Action, microbatch: str) -> str:
    if action.kind.is_of_stage:
        return f"{_VERBS[action.kind]}({action.stage})"
    peer = "" if action.peer is None else f", {action.peer}"
    return f"{_VERBS[action.kind]}({action.stage}, {microbatch}{peer})"
