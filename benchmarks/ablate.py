"""What each part of the planner is worth: problems planned with all parts, then without one of them.

    python benchmarks/planner.py ablate [--rows WORD ...] [--parts NAME ...] [--seeds N] [--resume FILE]

Tries are counted, at the effort of a limit of ten seconds, so that the outcome does not depend on the
machine; the solver's questions get the seconds of that limit, and rows where one of them was not answered are
named. A part that changed nothing which the outcome or a later part depends on is not left out: the plan
without it would be the same one. Every plan is appended to FILE as a line of JSON when it ends; what FILE
holds already is not planned again. Two plans run side by side.

Columns of the table, over rows and seeds: how often the part ran; how often it changed anything; how often it
won (it stands in the lineage of the order, or raised the bound of the certificate); how many of the plans
that it changed were made without it, too; how often the value is worse or better without it; mean and worst
loss of value without it; mean growth of the gap without it, in points of a per cent; processor seconds in it.
Means are over the plans that were made without the part and those that it did not change; dashes stand where
none was made without it yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.ablation_rows import ROWS, Row
from zbcompile.errors import NoOrderError
from zbcompile.planner.plan import PartRun, plan
from zbcompile.planner.portfolio import NAMES
from zbcompile.planner.unequal import PERMUTE

__all__ = ["Plan", "inert", "main", "planned", "table"]

SOLVER_S = {
    "quick_exact": 2.5,
    "quick_crossing": 10 / 12,
    "from_below": 10.0,
    "crossing": 10.0,
    "exact": 10.0,
}
"""Seconds that the parts with a solver get at most."""

PARTS = (*NAMES, PERMUTE)
"""What is left out, one after the other."""

Key = tuple[str, int, str]
"""Row, seed, and the part that was left out (none: empty)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One plan, as a line of the log.

    Attributes
    ----------
    row, seed, without
        What was planned; ``without`` is empty where all parts ran.
    value_ns, bound_ns
        Value and bound; no value where the parts that were left found no order.
    lineage, raised_by
        How the order came to be, and which part raised the bound last.
    cpu_s
        Processor seconds per part that ran.
    inert
        Parts that ran and changed nothing that matters.
    unanswered
        Parts whose solver ran out of time.
    seconds, timed_out
        Wall seconds, and whether the limit cut the search off.
    """

    row: str
    seed: int
    without: str
    value_ns: int | None
    bound_ns: int
    lineage: tuple[str, ...] = ()
    raised_by: str = ""
    cpu_s: dict[str, float] = field(default_factory=dict)
    inert: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()
    seconds: float = 0.0
    timed_out: bool = False

    @property
    def key(self) -> Key:
        """What was planned."""
        return self.row, self.seed, self.without

    @property
    def gap(self) -> float:
        """Share of the value that is not proved."""
        return (self.value_ns - self.bound_ns) / self.value_ns if self.value_ns else 1.0

    @property
    def winners(self) -> set[str]:
        """The parts in the lineage and the one that raised the bound."""
        return {step.split(" ")[0] for step in self.lineage} | ({self.raised_by} - {""})


def inert(trace: Sequence[PartRun]) -> set[str]:
    """Return the parts that ran, and without which everything that matters would be the same.

    The best order and the bound always matter; orders that are known or in the pool do if a later part looked
    at them, or if the run was inside another one, which looks at the end.
    """
    changed: set[str] = set()
    for k, part in enumerate(trace):
        matters = {"best", "bound"}
        for later in trace[k + 1 :]:
            matters |= later.read
        if part.depth:
            matters |= {"known", "pool", "folded"}
        if part.changed & matters:
            changed.add(part.name)
    return {part.name for part in trace} - changed


def planned(row: Row, seed: int, without: str = "") -> Plan:
    """Plan one row."""
    trace: list[PartRun] = []
    began = time.monotonic()
    left_out = {without} - {""}
    value, bound, lineage = None, 0, ()
    try:
        found = plan(
            row.problem,
            time_limit_s=row.time_limit_s,
            seed=seed,
            level=1,
            without=left_out,
            trace=trace.append,
        ).certificate
        value, bound, lineage = found.value_ns, found.bound_ns, found.lineage
    except NoOrderError:
        pass
    seconds, spent = time.monotonic() - began, defaultdict(float)
    for part in trace:
        spent[part.name] += part.cpu_s
    if row.problem.microbatch_costs and without != PERMUTE:
        spent[PERMUTE] += 0.0  # it is no part of the portfolio, and is not traced
    raised = [part.name for part in trace if "bound" in part.changed and not part.depth]
    return Plan(
        row.name,
        seed,
        without,
        value,
        bound,
        lineage,
        raised[-1] if raised else "",
        {name: round(cpu, 3) for name, cpu in spent.items()},
        tuple(sorted(inert(trace))),
        tuple(sorted({part.name for part in trace if part.wall_s > 0.9 * SOLVER_S.get(part.name, 1e9)})),
        round(seconds, 2),
        0 < row.time_limit_s < seconds,
    )


def read(path: Path | None) -> dict[Key, Plan]:
    """Read a log; a last line that was cut off is left out."""
    known: dict[Key, Plan] = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        for name in ("lineage", "inert", "unanswered"):
            fields[name] = tuple(fields[name])
        made = Plan(**fields)
        known[made.key] = made
    return known


def _ablated(
    row: Row, seed: int, parts: Sequence[str], known: dict[Key, Plan], log: Path | None
) -> list[Plan]:
    """Plan one row with one seed: with all parts, then without each that changed anything."""
    made: list[Plan] = []

    def once(without: str) -> Plan:
        found = known.get((row.name, seed, without))
        if found is None:
            found = planned(row, seed, without)
            made.append(found)
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
        return found

    whole = once("")
    for name in parts:
        if name in whole.cpu_s and name not in whole.inert:
            once(name)
    return made


def run(
    rows: Sequence[Row], parts: Sequence[str], seeds: int, log: Path | None, processes: int
) -> dict[Key, Plan]:
    """Plan everything that the log does not hold yet, and return all."""
    known = read(log)
    if log is not None and log.exists() and not log.read_text().endswith("\n"):
        with log.open("a") as file:  # the last line was cut off
            file.write("\n")
    units = [(row, seed) for seed in range(seeds) for row in rows]
    with ProcessPoolExecutor(processes) as pool:
        waiting = [pool.submit(_ablated, row, seed, parts, known, log) for row, seed in units]
        for k, future in enumerate(waiting):
            for made in future.result():
                known[made.key] = made
            row, seed = units[k]
            print(f"{k + 1}/{len(units)} {row.name}, seed {seed}", file=sys.stderr, flush=True)
    names = {row.name for row in rows}
    return {key: made for key, made in known.items() if key[0] in names and key[1] < seeds}


def table(plans: dict[Key, Plan], parts: Sequence[str] = PARTS) -> Iterator[str]:
    """Yield the table in Markdown, and what is to be known about it."""
    whole = [made for made in plans.values() if not made.without]
    yield "| part | ran | changed | won | without | worse | better | mean loss | worst | mean gap | cpu s |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for name in parts:
        yield _line(name, [made for made in whole if name in made.cpu_s], plans)
    yield ""
    proved = sum(made.value_ns == made.bound_ns for made in whole)
    yield f"{len(whole)} plans with all parts, {proved} proved; {len(plans) - len(whole)} without one."
    for what, names in (
        ("The solver ran out of its seconds", {made.row for made in plans.values() if made.unanswered}),
        ("The time limit cut off", {made.row for made in plans.values() if made.timed_out}),
    ):
        yield f"{what}: {', '.join(sorted(names)) or 'nowhere'}."


def _line(name: str, ran: Sequence[Plan], plans: dict[Key, Plan]) -> str:
    """Return the line of one part; ``ran`` are the plans with all parts in which it ran."""
    others = [(made, plans.get((made.row, made.seed, name))) for made in ran]
    pairs = [(made, other) for made, other in others if other is not None]
    losses = [o.value_ns / m.value_ns - 1 for m, o in pairs if m.value_ns and o.value_ns]
    gaps = [o.gap - m.gap for m, o in pairs if o.value_ns]
    none = sum(other.value_ns is None for _, other in pairs)
    worst = max(losses, default=0.0)
    changed = sum(name not in made.inert for made in ran)
    known = max(1, len(ran) - changed + len(pairs))
    cells: list[object] = [
        name,
        len(ran),
        changed,
        sum(name in made.winners for made in ran),
        len(pairs),
        sum(loss > 0 for loss in losses) + none,
        sum(loss < 0 for loss in losses),
        f"{sum(losses) / known:.3%}",
        f"no order ({none})" if none else f"{max(worst, 0.0):.2%}",
        f"{100 * sum(gaps) / known:.3f}",
        f"{sum(made.cpu_s[name] for made in ran):.0f}",
    ]
    if changed and not pairs:
        cells[4:10] = "0-----"
    return f"| {' | '.join(map(str, cells))} |"


def main(words: Sequence[str]) -> None:
    """Read the options, plan, and print the table."""
    parser = argparse.ArgumentParser(
        "planner.py ablate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=[""], help="words of row names (all)")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, metavar="NAME", help="(all)")
    parser.add_argument("--seeds", type=int, default=3, help="(3)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="log to append to")
    parser.add_argument("--processes", type=int, default=2, help="plans side by side (2)")
    arguments = parser.parse_args(words)
    rows = [row for row in ROWS if any(word in row.name for word in arguments.rows)]
    plans = run(rows, arguments.parts, arguments.seeds, arguments.resume, arguments.processes)
    print("\n".join(table(plans, arguments.parts)))
