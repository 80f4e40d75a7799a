"""``python -m tests.prove --count 2000``: asks the exact model for orders below the bound."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.prove.cases import Verdict, judge, make_problem


def main() -> int:
    """Judge the seeds and print the counts; 1 if the bound is violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each question to the solver")
    parser.add_argument("--every", action="store_true", help="ask too where another bound is as high")
    arguments = parser.parse_args()
    began, counts = time.monotonic(), Counter[Verdict]()
    for seed in range(arguments.first, arguments.first + arguments.count):
        problem = make_problem(seed)
        verdict, bound = judge(problem, time_limit_s=arguments.seconds, every=arguments.every)
        counts[verdict] += 1
        if verdict is Verdict.VIOLATED or arguments.count == 1:
            print(f"seed {seed}: {verdict.value}", problem, bound, sep="\n    ", flush=True)
    seconds = time.monotonic() - began
    said = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    print(f"{arguments.count} problems: {said}; {seconds:.0f} s")
    return 1 if counts[Verdict.VIOLATED] else 0


if __name__ == "__main__":
    sys.exit(main())
