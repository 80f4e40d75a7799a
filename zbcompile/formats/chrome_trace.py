"""Writes planned and measured timelines in Chrome's trace event format, for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zbcompile.formats.fields import format_json
from zbcompile.formats.measured_json import Measured
from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.messages import Message, messages_of
from zbcompile.schedule.simulate import Timeline
from zbcompile.schedule.stage_actions import update_ns

__all__ = ["dumps", "dumps_measured"]

_COMPUTE, _SEND, _RECEIVE, _WHOLE_STAGES = 0, 1, 2, 3
_Spans = dict[Action, tuple[int, int, int]]
"""Rank, start and end in ns of every action."""
_LANES = ((_COMPUTE, "compute"), (_SEND, "send"), (_RECEIVE, "receive"), (_WHOLE_STAGES, "whole stages"))


def dumps(timeline: Timeline) -> str:
    """Return the text of a planned timeline as a trace.

    Each rank is a process with a lane for compute, one for sends, one for receives, and a counter of bytes
    held, and where there are actions of stages as a whole a lane for these. The optimizer's step is an event
    of the compute lane. An arrow leads from every send to its receive; where the order has none, from the
    action that makes the message to the one that uses it. Times are in microseconds, as the format wants;
    memory is that of `zbcompile.schedule.simulate`.
    """
    events: list[object] = []
    spans: _Spans = {}
    for rank, row in enumerate(timeline.schedule.order):
        events += _names(rank, any(action.kind.is_of_stage for action in row))
        for k, action in enumerate(row):
            start, end = timeline.start[rank][k], timeline.end[rank][k]
            events.append(_event(rank, action, start, end))
            spans[action] = (rank, start, end)
            if action.kind.is_compute:
                at = start if action.kind is Kind.FORWARD else end
                events.append(
                    {
                        "name": "bytes held",
                        "ph": "C",
                        "pid": rank,
                        "ts": at / 1000,
                        "args": {"bytes": timeline.memory[rank][k]},
                    }
                )
        if update := update_ns(timeline.problem, rank):
            events.append(_update(rank, timeline.rank_end[rank] - update, update))
    messages = (message for _, message in messages_of(timeline.problem))
    events += _arrows(messages, spans)
    return format_json({"displayTimeUnit": "ms", "traceEvents": events})


def dumps_measured(measured: Measured) -> str:
    """Return the text of a measured step as a trace, with the same lanes and arrows."""
    events: list[object] = []
    spans: _Spans = {}
    for rank, row in enumerate(measured.ranks):
        events += _names(rank, any(action.kind.is_of_stage for action, _, _ in row))
        events += [_event(rank, action, start, end) for action, start, end in row]
        spans.update({action: (rank, start, end) for action, start, end in row})
    events += _arrows((Message.of(action) for action in spans if action.kind.is_send), spans)
    return format_json({"displayTimeUnit": "ms", "traceEvents": events})


def _arrows(messages: Iterable[Message], spans: _Spans) -> Iterator[object]:
    """Yield the two ends of every message, where both are there. Each lies inside its span."""
    for number, message in enumerate(messages):
        for phase, action in zip("sf", _ends(message, spans), strict=False):
            rank, start, end = spans[action]
            at = start if (phase == "f") == action.kind.is_compute else max(start, end - 1)
            yield {
                "name": "gradient" if message.backward else "activation",
                "cat": "message",
                "ph": phase,
                "id": number,
                "pid": rank,
                "tid": _lane(action),
                "ts": at / 1000,
                **({"bp": "e"} if phase == "f" else {}),
            }


def _ends(message: Message, spans: _Spans) -> tuple[Action, ...]:
    """Return the send and the receive of a message, else what makes and what uses it; none if one lacks."""
    if message.send in spans and message.recv in spans:
        return message.send, message.recv
    kinds = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD) if message.backward else (Kind.FORWARD,)
    found = []
    for stage in (message.source, message.target):
        actions = [Action(kind, stage, message.microbatch) for kind in kinds]
        found += [action for action in actions if action in spans][:1]
    return tuple(found) if len(found) == 2 else ()


def _names(rank: int, of_stages: bool) -> Iterator[object]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    for lane, name in _LANES[: None if of_stages else -1]:
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}


def _lane(action: Action) -> int:
    if action.kind.is_compute:
        return _COMPUTE
    if action.kind.is_of_stage:
        return _WHOLE_STAGES
    return _SEND if action.kind.is_send else _RECEIVE


def _update(rank: int, start_ns: int, length_ns: int) -> dict[str, object]:
    return {
        "name": "update",
        "cat": "update",
        "ph": "X",
        "pid": rank,
        "tid": _COMPUTE,
        "ts": start_ns / 1000,
        "dur": length_ns / 1000,
        "args": {},
    }


def _event(rank: int, action: Action, start_ns: int, end_ns: int) -> dict[str, object]:
    arguments: dict[str, object] = {"stage": action.stage}
    if not action.kind.is_of_stage:
        arguments["microbatch"] = action.microbatch
    if action.peer is not None:
        arguments["peer stage"] = action.peer
    return {
        "name": str(action),
        "cat": action.kind.value,
        "ph": "X",
        "pid": rank,
        "tid": _lane(action),
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": arguments,
    }
