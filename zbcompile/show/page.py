"""The page of `zbcompile show --html`: one file with all in it, to zoom, hover and follow a microbatch.

``orders with their times --> HTML``. The figures are in it as JSON; the script (``page.js``) turns them into
a picture and every text into text. The page fetches nothing, and its content security policy lets no script
run but that one. Nothing that a file says reaches HTML or script unescaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from zbcompile.errors import UsageError
from zbcompile.formats.measured_json import Measured
from zbcompile.schedule.critical_path import critical_path, waited_for
from zbcompile.schedule.ir import Action, Kind
from zbcompile.show.boxes import held_times, transfers_of
from zbcompile.show.head import head_lines
from zbcompile.show.once_lane import NAMES, Once, kind_of, once_among, once_times
from zbcompile.show.palette import KIND_COLOURS
from zbcompile.show.summary import Summary, headline
from zbcompile.show.units import format_bytes, percent

__all__ = ["MOST_ACTIONS", "MOST_RANKS", "Shown", "page", "page_data"]

MOST_ACTIONS = 400_000
"""Most compute actions of a page: about 20 MB, which a browser opens in some seconds."""
MOST_RANKS = 512
"""Most rows of a page, all timelines together: a canvas can be no taller."""

_Place = tuple[int, int]
"""Rank and position of an action."""
_SIGN = {
    Kind.FORWARD: "F",
    Kind.BACKWARD_INPUT: "B",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.FULL_BACKWARD: "X",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """One timeline of a page.

    Attributes
    ----------
    name
        What stands above it.
    summary
        The order and its planned times.
    measured
        The measured step to draw in place of the planned times.
    """

    name: str
    summary: Summary
    measured: Measured | None = None


def page(shown: Sequence[Shown]) -> str:
    """Return the text of the page, timelines one above the other on one time axis.

    Raises
    ------
    UsageError
        There are more actions or ranks than a page holds.
    """
    _check_size(shown)
    script, style = _part("page.js"), _part("page.css")
    data = json.dumps(page_data(shown), separators=(",", ":"), sort_keys=True)
    parts = {
        "title": html.escape(headline(shown[0].summary)),
        "style": style,
        "style hash": _hash(style),
        "script": script,
        "script hash": _hash(script),
        "tables": "\n".join(_table(one) for one in shown),
        "data": data.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"}),
    }
    return re.sub(r"\{\{([a-z ]+)\}\}", lambda match: parts[match[1]], _part("page.html"))


def _part(name: str) -> str:
    return (resources.files("zbcompile.show") / name).read_text("utf-8")


def _hash(text: str) -> str:
    """Return how a content security policy names a script or a style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _check_size(shown: Sequence[Shown]) -> None:
    ranks = sum(one.summary.timeline.schedule.num_ranks for one in shown)
    actions = sum(a.kind.is_compute for one in shown for row in _rows(one) for a, _, _ in row)
    for given, most, what in ((ranks, MOST_RANKS, "ranks"), (actions, MOST_ACTIONS, "actions")):
        if given > most:
            raise UsageError(
                f"a page holds no more than {most} {what}",
                needed=f"at most {most}",
                given=given,
                fix="use `zbcompile convert --to chrome` and Perfetto, or show fewer microbatches",
            )


def _rows(one: Shown) -> Iterator[Sequence[tuple[Action, int, int]]]:
    """Yield per rank (action, start, end) in the order of the timeline, or of time where it is measured."""
    if one.measured is not None:
        yield from (sorted(row, key=lambda event: event[1]) for row in one.measured.ranks)
        return
    timeline = one.summary.timeline
    for row, starts, ends in zip(timeline.schedule.order, timeline.start, timeline.end, strict=True):
        yield list(zip(row, starts, ends, strict=True))


def page_data(shown: Sequence[Shown]) -> dict[str, object]:
    """Return what the script draws, as plain values: times in ns, memory in bytes."""
    unit = shown[0].summary.unit
    return {
        "unit": {"size": unit.size_ns, "name": unit.name},
        "colours": {_SIGN[kind]: shades for kind, shades in KIND_COLOURS.items()},
        "once": {letter: [words, _SIGN[kind_of(letter)]] for letter, words in NAMES.items()},
        "views": [_view(one) for one in shown],
    }


def _view(one: Shown) -> dict[str, object]:
    timeline = one.summary.timeline
    planned = one.measured is None
    rows = [[(k, *event) for k, event in enumerate(row) if event[0].kind.is_compute] for row in _rows(one)]
    waits, path = _waits(one.summary) if planned else ({}, set())
    end = timeline.makespan_ns if one.measured is None else one.measured.makespan_ns
    once = [_once(one, rank) for rank in range(len(rows))]
    last = max((end, *(at.end_ns for row in once for at in row)))
    words = f"measured makespan {one.summary.unit.text(end)}"
    return {
        "name": one.name,
        "head": [text for text, _ in head_lines(one.summary)] if planned else [words],
        "end": last,
        "ranks": [
            {
                **_rank(one, rank, row, waits, path),
                "once": [[o.letter, o.stage, o.start_ns, o.end_ns] for o in once[rank]],
            }
            for rank, row in enumerate(rows)
        ],
        "messages": list(_messages(one)) if planned else [],
    }


def _once(one: Shown, rank: int) -> list[Once]:
    """Return what a rank does once a step, planned or measured."""
    if one.measured is None:
        return once_times(one.summary.timeline, rank)
    return once_among(one.measured.ranks[rank])


def _rank(
    one: Shown,
    rank: int,
    row: Sequence[tuple[int, Action, int, int]],
    waits: dict[_Place, tuple[int, int, int]],
    path: set[_Place],
) -> dict[str, object]:
    """Return a rank's row. Times are gaps since the end before, and lengths; bytes are changes."""
    timeline, problem = one.summary.timeline, one.summary.timeline.problem
    planned = one.measured is None and one.summary.has_profile
    held_by_sends = held_times(timeline, rank) if one.measured is None else ()
    base, before = problem.static_bytes(rank), 0
    gaps, changes, held = [], [], base
    for k, _, start, end in row:
        gaps.append(start - before)
        before = end
        if planned:
            changes.append(timeline.memory[rank][k] - held)
            held = timeline.memory[rank][k]
    return {
        "rank": rank,
        "stages": list(problem.placement.stages_of(rank)),
        "kind": "".join(_SIGN[action.kind] for _, action, _, _ in row),
        "stage": [action.stage for _, action, _, _ in row],
        "microbatch": [action.microbatch for _, action, _, _ in row],
        "gap": gaps,
        "length": [end - start for _, _, start, end in row],
        "base": base,
        "change": changes,
        "cap": problem.caps[rank] if planned else None,
        "most": max(timeline.peak_bytes),
        "wait": {n: waits[rank, k] for n, (k, *_) in enumerate(row) if (rank, k) in waits},
        "path": [n for n, (k, *_) in enumerate(row) if (rank, k) in path],
        "holds": [[start, end] for _, start, end in held_by_sends],
    }


def _waits(summary: Summary) -> tuple[dict[_Place, tuple[int, int, int]], set[_Place]]:
    """Return what actions waited for, and the critical path, both by (rank, position).

    An action waited for (rank, number among its rank's compute actions) that made what was missing; a third
    figure is 1 where that is this rank's own last action, whose send was still to be received. Actions that
    began when their rank was done with the one before waited for nothing.
    """
    timeline = summary.timeline
    graph = summary.event_graph()
    start, duration, decides = graph.earliest() or [], graph.duration, waited_for(graph)
    rows = [[node for node in nodes if graph.transfer_of[node] < 0] for nodes in graph.node_of]
    place = {node: (rank, n) for rank, row in enumerate(rows) for n, node in enumerate(row)}
    waits: dict[_Place, tuple[int, int, int]] = {}
    for rank, row in enumerate(rows):
        free = 0
        for n, node in enumerate(row):
            cause = decides[node] if start[node] > free else -1
            free = start[node] + duration[node]
            while cause >= 0 and cause not in place:
                cause = decides[cause]
            if cause >= 0:
                waits[rank, graph.positions.position[node]] = (
                    *place[cause],
                    int(place[cause] == (rank, n - 1)),
                )
    return waits, set(critical_path(graph, timeline))


def _messages(one: Shown) -> Iterator[list[int]]:
    """Yield (source rank, target rank, microbatch, start, end) of every message."""
    timeline = one.summary.timeline
    rank_of = timeline.problem.placement.rank_of
    for rank, row in enumerate(transfers_of(timeline)):
        for message, transfer in row:
            target = rank_of[message.target]
            yield [rank, target, message.microbatch, transfer.start_ns, transfer.end_ns]


def _table(one: Shown) -> str:
    """Return the figures of every rank as a table, for those who do not see the picture."""
    timeline, unit = one.summary.timeline, one.summary.unit
    names = ["rank", "stages", "work", "idle", *(["most held", "cap"] if one.summary.has_profile else [])]
    whole = timeline.value_ns if one.measured is None else one.measured.makespan_ns
    lines = []
    for rank in range(timeline.schedule.num_ranks):
        busy = timeline.busy_ns(rank) if one.measured is None else one.measured.busy_ns(rank)
        stages = ", ".join(map(str, timeline.problem.placement.stages_of(rank)))
        cells = [str(rank), stages, unit.text(busy), percent(1 - busy / whole) if whole else ""]
        if one.summary.has_profile:
            cap = timeline.problem.caps[rank]
            cells += [format_bytes(timeline.peak_bytes[rank]), "none" if cap is None else format_bytes(cap)]
        lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f"<details><summary>{html.escape(one.name)}: every rank</summary>\n"
        f"<table>\n<tr>{head}</tr>\n" + "\n".join(lines) + "\n</table>\n</details>"
    )
