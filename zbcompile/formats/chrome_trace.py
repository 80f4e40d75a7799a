"""Writes planned and measured timelines in Chrome's trace event format, for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator

from zbcompile.formats.fields import format_json
from zbcompile.formats.measured_json import Measured
from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.simulate import Timeline

__all__ = ["dumps", "dumps_measured"]

_COMPUTE, _SEND, _RECEIVE = 0, 1, 2
_LANES = ((_COMPUTE, "compute"), (_SEND, "send"), (_RECEIVE, "receive"))


def dumps(timeline: Timeline) -> str:
    """Return the text of a planned timeline as a trace.

    Each rank is a process with a lane for compute, one for sends, one for receives, and a counter of bytes
    held. Times are in microseconds, as the format wants; memory is that of `zbcompile.schedule.simulate`.
    """
    events: list[object] = []
    for rank, row in enumerate(timeline.schedule.order):
        events += _names(rank)
        for k, action in enumerate(row):
            start, end = timeline.start[rank][k], timeline.end[rank][k]
            events.append(_event(rank, action, start, end))
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
    return format_json({"displayTimeUnit": "ms", "traceEvents": events})


def dumps_measured(measured: Measured) -> str:
    """Return the text of a measured step as a trace, with the same lanes."""
    events: list[object] = []
    for rank, row in enumerate(measured.ranks):
        events += _names(rank)
        events += [_event(rank, action, start, end) for action, start, end in row]
    return format_json({"displayTimeUnit": "ms", "traceEvents": events})


def _names(rank: int) -> Iterator[object]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    for lane, name in _LANES:
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}


def _event(rank: int, action: Action, start_ns: int, end_ns: int) -> dict[str, object]:
    lane = _COMPUTE if action.kind.is_compute else _SEND if action.kind.is_send else _RECEIVE
    arguments: dict[str, object] = {"stage": action.stage, "microbatch": action.microbatch}
    if action.peer is not None:
        arguments["peer stage"] = action.peer
    return {
        "name": str(action),
        "cat": action.kind.value,
        "ph": "X",
        "pid": rank,
        "tid": lane,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": arguments,
    }
