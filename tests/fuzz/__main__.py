"""``python -m tests.fuzz --count 10000``: runs so many seeds, prints a summary and every failing seed."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.fuzz.cases import make_case
from tests.fuzz.run import run_here, run_process
from zbcompile.cli.main import COMMANDS

NAMES = {command.name for command in COMMANDS}
PROCESS_EVERY = 50
"""Every so many seeds, one runs as a process of its own, under the redirections of a shell."""


def failures(seed: int) -> list[str]:
    """Run a seed and return what is wrong."""
    case = make_case(seed)
    return run_process(case) if seed % PROCESS_EVERY == 0 else run_here(case)


def main() -> int:
    """Run the seeds; 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    began, failed = time.monotonic(), 0
    commands: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.count):
        case = make_case(seed)
        name = case.words[0] if case.words else ""
        commands[name if name in NAMES else "other"] += 1
        wrong = failures(seed)
        if wrong:
            failed += 1
            print(
                f"seed {seed}: {ascii(case.words)[:300]} {case.redirection}", *wrong, sep="\n    ", flush=True
            )
        if arguments.count == 1:
            print(case)
    seconds = time.monotonic() - began
    print(f"{arguments.count} inputs, {failed} failed, {seconds:.0f} s;", dict(commands.most_common(12)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
