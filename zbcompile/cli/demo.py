"""``zbcompile demo``: a GPT-2 from model to four processes, compared with autograd.

torch is imported when the command runs.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from rich.text import Text

from zbcompile.cli.console import draw
from zbcompile.cli.inputs import check_directory, parse_bytes
from zbcompile.cli.shared_options import positive, words
from zbcompile.formats.fields import format_json
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.formats.streams import check_output, say, write_output
from zbcompile.show.summary import summarize, to_json
from zbcompile.show.timeline import Picture

if TYPE_CHECKING:
    from zbcompile.demo import Comparison

__all__ = ["add_options", "run"]

_SHOWN_RANK = 1
_SHOWN_LINES = 42


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--steps", type=positive, default=3, help="optimizer steps (3)")
    parser.add_argument("--microbatches", type=positive, default=8, help="microbatches of a step (8)")
    parser.add_argument(
        "--memory-limit", type=words, metavar="BYTES", help="per rank: 128MiB (the default), 1GiB, ..."
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 1 when a loss or gradient is not what autograd gives."""
    check_directory()
    check_output()
    limit = None if arguments.memory_limit is None else parse_bytes(arguments.memory_limit)
    from zbcompile import demo
    from zbcompile.autograd_oracle import count_draws

    settings = demo.Settings(
        arguments.steps,
        arguments.microbatches,
        demo.Settings.memory_limit if limit is None else limit,
    )
    began = time.monotonic()

    def step(text: str) -> None:
        say(f"[{time.monotonic() - began:5.1f} s] {text}")

    model = demo.gpt2(settings)
    count = sum(p.numel() for p in model.parameters())
    step(f"GPT-2, {settings.blocks} blocks, hidden {settings.hidden}, {count:,} parameters, dropout on")
    pipeline = demo.compiled(
        settings, model, observer=lambda name, _: step(name) if "." not in name else None
    )
    draws = [count_draws(stage) for stage in pipeline]
    summary = summarize(ScheduleFile(pipeline.schedule, pipeline.solution.problem, pipeline.certificate))
    for part in (Picture(summary), Text(_excerpt(pipeline.source(_SHOWN_RANK)))):
        draw(part, on_error=arguments.json)
    step(f"training on {summary.timeline.schedule.num_ranks} gloo processes")
    records = demo.run_processes(settings, pipeline.solution)
    result = demo.compare(settings, records, draws, step)
    step(_verdict(result))
    for line in result.wrong:
        say(f"wrong: {line}")
    if arguments.json:
        figures = {
            "plan": to_json(summary),
            "losses": list(result.losses),
            "reference_losses": list(result.reference_losses),
            "gradients_compared": result.compared,
            "gradients_bitwise_equal": result.equal,
            "tied_table_relative_difference": result.tied,
            "ok": result.ok,
        }
        write_output(format_json(figures))
    return 0 if result.ok else 1


def _excerpt(program: str) -> str:
    """Return the first lines of a rank's program."""
    lines = program.splitlines()
    rest = len(lines) - _SHOWN_LINES
    shown = lines[:_SHOWN_LINES] + ([f"... {rest} more lines"] if rest > 0 else [])
    return (
        f"\nThe program of rank {_SHOWN_RANK}:\n\n"
        + "\n".join(f"    {line}".rstrip() for line in shown)
        + "\n"
    )


def _verdict(result: Comparison) -> str:
    words = f"{result.equal} of {result.compared} gradients equal plain autograd to the bit"
    if result.equal < result.compared:
        words += f"; the tied table's within {result.tied:.1e} (its sum runs in another order)"
    return words + ("; every loss is equal" if result.losses == result.reference_losses else "")
