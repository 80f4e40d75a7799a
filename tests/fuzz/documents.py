"""Files for the fuzzer: sound ones of every format, and ways to break them.

Everything is drawn from one `random.Random`, so that a seed gives the same bytes everywhere.
"""

from __future__ import annotations

import json
import random
from typing import Any

from zbcompile.formats import measured_json, profile_json, schedule_json, torch_csv
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.schedule.check import faults
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.problem import OBJECTIVES, TRANSPORTS, Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Certificate

__all__ = ["NASTY", "factory", "measured", "profile", "schedule"]

BIG = (1 << 53) - 1
NASTY = (
    "",
    " ",
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\u202e",
    "\ud800",
    "\x00",
    "0\n1",
    "\u00b2",
    "\u0663",
    "9" * 30,
    "9" * 5000,
    "-1",
    "1e999",
    "nan",
    "a" * 3000,
    "[bold red]x[/bold red]",
    "{0}%s",
    "../../etc/passwd",
    "__import__('os')",
)
_AMOUNTS = (0, 0, 1, 2, 3, 7, 100, 1000, 10**6, 10**9, BIG // 4, BIG, BIG + 1, 10**30, -1)
_EDGES = (0, 0, 0, 1, 10**9, BIG // 1000, BIG // 4, BIG)
_VALUES: tuple[Any, ...] = (None, True, False, 1.5, -1, 0, 1, BIG, BIG + 1, 10**30, [], {}, [[]], [None] * 50)


def profile(rng: random.Random) -> str:
    """Return a profile, sound three times in five."""
    made = _profile_file(rng)
    text = profile_json.dumps(made) if made is not None else "{}"
    return _perhaps_broken(rng, text)


def schedule(rng: random.Random) -> tuple[str, str]:
    """Return a schedule in one of its forms, sound about half of the time, and the ending of its name."""
    order = _disturbed(rng, _order(rng))
    form = rng.choice(("json", "json", "json", "csv", "txt"))
    if form == "csv":
        try:
            text = torch_csv.dumps(order)
        except ValueError:
            text = torch_csv.dumps(order, communication=False)
    elif form == "txt":
        text = str(order)
    else:
        text = _schedule_json(rng, order)
    ending = form if rng.random() < 0.8 else rng.choice(("json", "csv", "txt", "JSON", ""))
    return _perhaps_broken(rng, text), ending


def measured(rng: random.Random) -> str:
    """Return a measured timeline, mostly sound."""
    order = _order(rng)
    rows = []
    for row in order.order:
        at, times = rng.randrange(1000), []
        for action in row:
            length = rng.choice((0, 1, 10, 1000))
            times.append((action, at, at + length))
            at += length
        rows.append(times)
    return _perhaps_broken(rng, measured_json.dumps(measured_json.Measured.of(rows, "fuzz")))


def factory(rng: random.Random) -> str:
    """Return a Python file whose function ``make`` gives no model."""
    bodies = (
        "def make(): return 3",
        "def make(): return (1, 2)",
        "def make(): raise ValueError('\\x1b[2Jno')",
        "import sys\nsys.exit(7)",
        "def make():\n    import sys\n    sys.exit()",
        "print('{}')\ndef make(): print('noise')",
        "def make(:",
        "make = 3",
        "raise RuntimeError",
        "\x00",
        "",
    )
    return rng.choice(bodies) + "\n"


def _amount(rng: random.Random, wild: bool) -> int:
    return rng.choice(_EDGES) if wild and rng.random() < 0.3 else rng.randrange(1000)


def _stage(rng: random.Random, *, nested: bool = False) -> StageCost:
    wild = rng.random() < 0.07
    numbers = [_amount(rng, wild) for _ in range(7)]
    ways = () if nested or rng.random() < 0.8 else tuple(_stage(rng, nested=True) for _ in range(2))
    return StageCost(*numbers, name=rng.choice(("", "", "layer", "\u00b5\u00b7")), variants=ways)


def _profile_file(rng: random.Random) -> ProfileFile | None:
    count = rng.choice((1, 2, 2, 3, 3, 4, 5, 6))
    stages = tuple(_stage(rng) for _ in range(count))
    if rng.random() < 0.4:
        stages = (stages[0],) * count
    edges: tuple[Edge, ...] = ()
    if rng.random() < 0.2 and count > 1:
        pairs = {tuple(sorted(rng.sample(range(count), 2))) for _ in range(3)}
        edges = tuple(Edge(a, b, _size(rng), _size(rng), rng.random() < 0.8) for a, b in pairs)
    costs = Profile(
        stages,
        edges,
        Link(rng.choice((0, 0, 5, 1000)), rng.choice((0, 0, 1, 10**9))),
        (((0, 1), Link(7)),) if rng.random() < 0.1 else (),
        rng.choice((0, 0, 0, 10)),
        rng.choice(("", "fuzz", "x" * 1000)),
    )
    caps: tuple[int | None, ...] = ()
    if rng.random() < 0.2:
        caps = (rng.choice((0, 100, 5000, 10**7, BIG, None)),)
    return ProfileFile(
        costs,
        None if rng.random() < 0.8 else Placement.linear(count),
        rng.choice((None, 1, 2, 3, 5, 8)),
        caps,
        rng.choice((None, *OBJECTIVES)),
        rng.choice((None, *TRANSPORTS)),
    )


def _size(rng: random.Random) -> int:
    return rng.choice((0, 1, 1000, 10**6))


def _order(rng: random.Random) -> Schedule:
    """Return a legal order without communication: all forwards, then all backwards."""
    count, m = rng.choice((1, 2, 2, 3, 4)), rng.choice((1, 2, 3, 4))
    places = [Placement.linear(count)]
    if count % 2 == 0:
        places += [Placement.v(count // 2, 2), Placement.looped(count // 2, 2)]
    placement = rng.choice(places)
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    split = rng.random() < 0.5
    for i in range(m):
        for s, rank in enumerate(placement.rank_of):
            rows[rank].append(Action(Kind.FORWARD, s, i))
    for i in range(m):
        for s, rank in reversed(list(enumerate(placement.rank_of))):
            kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split else (Kind.FULL_BACKWARD,)
            rows[rank].extend(Action(kind, s, i) for kind in kinds)
    return Schedule.of(placement, m, rows)


def _disturbed(rng: random.Random, order: Schedule) -> Schedule:
    """Return an order with sends and receives, or with actions moved, or as it is."""
    if rng.random() < 0.3:
        costs = Profile.uniform(StageCost.simple(3, 3, 2), order.num_stages)
        transport = rng.choice(TRANSPORTS)
        problem = Problem(costs, order.placement, order.num_microbatches, transport=transport)
        order = insert_communication(order, problem)
    rows = [list(row) for row in order.order]
    for _ in range(rng.choice((0, 0, 0, 1, 2, 6))):
        row = rng.choice(rows)
        if not row:
            continue
        k = rng.randrange(len(row))
        way = rng.randrange(5)
        if way == 0:
            row[k], row[k - 1] = row[k - 1], row[k]
        elif way == 1:
            row.insert(rng.randrange(len(row)), row.pop(k))
        elif way == 2:
            rng.choice(rows).append(row.pop(k))
        elif way == 3:
            row.append(row[k])
        else:
            del row[k]
    return Schedule.of(order.placement, order.num_microbatches, rows)


def _schedule_json(rng: random.Random, order: Schedule) -> str:
    if rng.random() < 0.3:
        return schedule_json.dumps(order)
    stages = tuple(_stage(rng) for _ in range(order.num_stages))
    offered = Profile(stages, link=Link(rng.choice((0, 5))), overhead_ns=rng.choice((0, 3)), source="fuzz")
    variants = tuple(rng.randrange(len(s.variants) + 1) for s in stages)
    caps = (rng.choice((None, None, BIG, 100)),) * order.num_ranks
    problem = Problem(
        offered.choose(variants),
        order.placement,
        order.num_microbatches,
        caps,
        rng.choice(OBJECTIVES),
        rng.choice(TRANSPORTS),
    )
    certificate = None
    if rng.random() < 0.6 and not faults(order, problem):
        value = simulate(order, problem).value_ns + (rng.random() < 0.1)
        bound = rng.choice((0, value // 2, value))
        certificate = Certificate(
            problem.objective, value, bound, rng.choice(("work", "variants", "cp_sat", "magic")), {"rank": 0}
        )
    return schedule_json.dumps(
        ScheduleFile(
            order,
            problem,
            certificate,
            variants if offered.offers_variants else (),
            "fuzz",
            offered if offered.offers_variants else None,
        )
    )


def _perhaps_broken(rng: random.Random, text: str) -> str:
    """Return a text as it is, or with one to three faults."""
    if rng.random() < 0.65:
        return text
    for _ in range(rng.choice((1, 1, 2, 3))):
        text = _broken_value(rng, text) if text.startswith("{") and rng.random() < 0.7 else _broken(rng, text)
    return text


def _broken_value(rng: random.Random, text: str) -> str:
    """Break one place of a JSON document."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return _broken(rng, text)
    place = document
    while isinstance(place, (dict, list)) and place:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.7:
            place = inner
            continue
        _change(rng, place, key)
        break
    return json.dumps(document)


def _change(rng: random.Random, place: Any, key: Any) -> None:
    way = rng.randrange(6)
    if way == 0:
        del place[key]
    elif way == 1:
        place[key] = rng.choice(NASTY)
    elif way == 2 and isinstance(place, list):
        place.insert(rng.randrange(len(place) + 1), place[key])
    elif way == 3 and isinstance(place, list):
        rng.shuffle(place)
    elif way == 4 and isinstance(place, dict):
        place[rng.choice(("unknown", "version", "format", "repeat", "\x1b[2J"))] = rng.choice(
            (1, 2, "x", None)
        )
    else:
        place[key] = rng.choice((*_VALUES, *_AMOUNTS))


def _broken(rng: random.Random, text: str) -> str:
    """Break a text of any format at one place."""
    at = rng.randrange(len(text) + 1)
    to = min(len(text), at + rng.choice((1, 1, 2, 5, 40)))
    way = rng.randrange(8)
    if way == 0:
        return text[:at]
    if way == 1:
        return text[:at] + text[to:]
    if way == 2:
        return text[:at] + rng.choice(NASTY) + text[at:]
    if way == 3:
        return text[:at] + text[at:to] * rng.choice((2, 50)) + text[to:]
    if way == 4:
        return text[:at] + str(rng.choice(_AMOUNTS)) + text[to:]
    if way == 5:
        return rng.choice(("\ufeff", "\n\n", " ", "[" * 5000, "#")) + text
    if way == 6:
        return text.replace("\n", rng.choice(("\r\n", "\r", "\n\n", " ")))
    lines = text.splitlines(keepends=True)
    rng.shuffle(lines)
    return "".join(lines)
