"""Model configurations through the compiler: right, refused, crash or too slow, by family.

    python benchmarks/models.py [--family NAME ...] [--only NAME ...] [--first N] [--count N] [--json FILE]
    python benchmarks/models.py --list

Each configuration is compiled over a few stages with verify on, runs one step of two microbatches in one
process, and is then compared with plain autograd over the same microbatches: losses, outputs, every gradient,
parameters and buffers, with the same random numbers. Sizes are tiny, weights random, nothing is downloaded.

* right: bitwise, or within 1e-6 relative of each tensor (the difference is said)
* right with an option: right with an option that the refusal without it names
* refused: an error of this package that says what cannot be done
* crash: any other error, an error that asks to report the model (verify found a value that differs), or a
  process that died
* wrong: a value differs after a step that raised nothing
* too slow: more processor time than --seconds
* not run: a package is missing, or the untouched model alone fails

Most need transformers (extra `test`); the others need what the extra `models` names. Each configuration runs
in a process of its own, one after the other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.model_cases import CASES
from benchmarks.model_cases.case import BATCH, Inputs, ModelCase, mean_square
from benchmarks.model_cases.check import Row, Verdict, check

_RIGHT = (Verdict.RIGHT, Verdict.OPTION)
WALL_FACTOR = 5
"""Wall-clock seconds that a process gets per second of processor time: the machine may be busy."""


def run_case(case: ModelCase, seconds: float) -> Row:
    """Run one configuration in a process of its own.

    The process is a fork of this one, which has imported torch and compiled one tiny model.
    """
    if case.package and importlib.util.find_spec(case.package) is None:
        return Row(case.name, case.family, Verdict.NOT_RUN, f"{case.package} is not installed")
    here, there = multiprocessing.Pipe(duplex=False)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = multiprocessing.get_context("fork").Process(target=_work, args=(case, there, seconds))
    process.start()
    there.close()
    row, at = _listen(here, seconds * WALL_FACTOR)
    if row is None:
        process.kill()
    process.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if row is None:
        slow = process.exitcode == -signal.SIGXCPU or spent >= seconds
        verdict = Verdict.SLOW if slow or process.exitcode == -signal.SIGKILL else Verdict.CRASH
        detail = f"over {seconds:g} s" if verdict is Verdict.SLOW else f"exit code {process.exitcode}"
        row = Row(case.name, case.family, verdict, detail)
    return replace(row, at=at, seconds=round(spent, 1))


def _work(case: ModelCase, pipe: Connection, seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    pipe.send(check(case, pipe.send))
    pipe.close()
    os._exit(0)


def _listen(pipe: Connection, seconds: float) -> tuple[Row | None, str]:
    """Return the row that a process sends, or None, and the last step that it spoke of."""
    at = ""
    try:
        while pipe.poll(seconds):
            message = pipe.recv()
            if isinstance(message, Row):
                return message, at
            at = message
    except EOFError:
        pass
    return None, at


def chosen(arguments: argparse.Namespace) -> Sequence[ModelCase]:
    """Return the configurations that were asked for, in their order."""
    found: Iterable[ModelCase] = CASES
    if arguments.family:
        found = [case for case in found if case.family in arguments.family]
    if arguments.only:
        found = [case for case in found if case.name in arguments.only]
    last = None if arguments.count is None else arguments.first + arguments.count
    return list(found)[arguments.first : last]


def table(rows: Sequence[Row]) -> str:
    """Return counts by family, then every row that is not right with its reason."""
    verdicts = [v for v in Verdict if v in (*_RIGHT, Verdict.REFUSED, Verdict.CRASH) or _count(rows, v)]
    lines = ["| family | tried | " + " | ".join(verdicts) + " |", "|---" * (len(verdicts) + 2) + "|"]
    for family in [*dict.fromkeys(row.family for row in rows), "all"]:
        mine = [row for row in rows if family in (row.family, "all")]
        tried = len(mine) - _count(mine, Verdict.NOT_RUN)
        counts = " | ".join(str(_count(mine, v)) for v in verdicts)
        lines.append(f"| {family} | {tried} | {counts} |")
    right = [row for row in rows if row.verdict in _RIGHT]
    bitwise = sum(row.detail.startswith("bitwise") for row in right)
    lines += ["", f"Bitwise: {bitwise} of the {len(right)} that are right."]
    for row in rows:
        if row.verdict is not Verdict.RIGHT:
            lines.append(f"* {row.name} ({row.family}): {row.verdict} after {row.at}: {row.detail}")
    return "\n".join(lines)


def _count(rows: Sequence[Row], verdict: Verdict) -> int:
    return sum(row.verdict is verdict for row in rows)


def _warm() -> None:
    """Import before the forks what every one of them would import, and compile a tiny model once."""
    if importlib.util.find_spec("transformers"):
        importlib.import_module("transformers.modeling_utils")
    tiny = ModelCase(
        "tiny",
        "",
        lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))),
        lambda model: Inputs((torch.randn(BATCH, 4),)),
        mean_square,
    )
    row = check(tiny, lambda step: None)
    if row.verdict is not Verdict.RIGHT:
        raise SystemExit(f"a tiny model is {row.verdict}: {row.detail}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    families = list(dict.fromkeys(case.family for case in CASES))
    parser.add_argument("--family", nargs="+", choices=families, metavar="NAME", help=", ".join(families))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names, as --list prints them")
    parser.add_argument("--first", type=int, default=0, help="leave out so many at the start")
    parser.add_argument("--count", type=int, help="run at most so many")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor time of one (default 60)")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    parser.add_argument("--json", type=Path, help="write the rows to a file, after each of them")
    arguments = parser.parse_args()
    cases = chosen(arguments)
    if arguments.list:
        for case in cases:
            print(f"{case.family:24s} {case.name}")
        return
    _warm()
    rows = []
    for case in cases:
        row = run_case(case, arguments.seconds)
        rows.append(row)
        print(f"{row.verdict:9s} {row.seconds:5.1f} s  {row.name}: {row.detail}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
