"""``python -m tests.prove --count 2000``: asks the exact model for orders below the bound.

``--plans`` plans the problems instead, under a random send mode each, and counts those proved optimal.
``--everything`` plans problems of every kind and looks for false claims (`tests.prove.everything`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.prove.cases import Verdict, judge, make_problem, with_send_mode
from tests.prove.everything import attack, make_task
from zbcompile.planner.plan import plan
from zbcompile.schedule.simulate import simulate


def main() -> int:
    """Judge the seeds and print the counts; 1 if the bound is violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each question to the solver")
    parser.add_argument("--every", action="store_true", help="ask too where another bound is as high")
    parser.add_argument("--plans", action="store_true", help="plan under a random send mode; count proofs")
    parser.add_argument(
        "--everything", action="store_true", help="plan problems of every kind, look for faults"
    )
    arguments = parser.parse_args()
    if arguments.plans:
        return plans(range(arguments.first, arguments.first + arguments.count), arguments.seconds)
    if arguments.everything:
        return everything(range(arguments.first, arguments.first + arguments.count), arguments.seconds)
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


def plans(seeds: range, seconds: float) -> int:
    """Plan every problem and print how many were proved, by send mode; 1 if a certificate does not hold."""
    began, proved, all_of = time.monotonic(), Counter[str](), Counter[str]()
    wrong = 0
    for seed in seeds:
        problem = with_send_mode(seed)
        solution = plan(problem, time_limit_s=seconds)
        all_of[problem.transport] += 1
        proved[problem.transport] += solution.certificate.is_optimal
        if simulate(solution.schedule, problem).value_ns != solution.certificate.value_ns:
            wrong += 1
            print(f"seed {seed}: another value than certified", problem, sep="\n    ", flush=True)
    said = ", ".join(f"{proved[mode]} of {all_of[mode]} {mode}" for mode in sorted(all_of))
    print(f"{proved.total()} of {all_of.total()} proved: {said}; {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def everything(seeds: range, seconds: float) -> int:
    """Plan problems of every kind and print what does not hold, and how many were proved; 1 at any fault."""
    began, all_of, optimal, faulty = time.monotonic(), Counter[str](), Counter[str](), 0
    for seed in seeds:
        task = make_task(seed)
        outcome = attack(task, seconds=seconds / 5, exact_s=seconds / 5, seed=seed)
        all_of[task.kind] += 1
        optimal[task.kind] += bool(outcome.optimal)
        faulty += bool(outcome.faults)
        for fault in outcome.faults:
            print(f"seed {seed}, {task.kind}: {fault}", flush=True)
    said = ", ".join(f"{optimal[kind]} of {all_of[kind]} {kind}" for kind in sorted(all_of))
    print(f"{faulty} faulty; proved optimal: {said}; {time.monotonic() - began:.0f} s")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
