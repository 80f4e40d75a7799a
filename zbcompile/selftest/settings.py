"""How large the self-test is, and what a section hands back."""

from __future__ import annotations

from dataclasses import dataclass, field

from zbcompile.formats.selftest_json import FAILED, PASSED, SKIPPED

__all__ = ["SIZES", "Found", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What is run where.

    Attributes
    ----------
    device
        ``cpu`` or ``cuda``.
    size
        Its name in `SIZES`.
    hidden, length, rows
        Of the blocks whose phases are timed: width, sequence, sequences of a microbatch.
    blocks
        Blocks of the timed stage.
    dtype
        Of the timed blocks, as torch calls it.
    rounds
        Runs of each way that count, after one that does not.
    backends
        What compiles the graphs that are timed.
    families
        Kinds of blocks that are timed.
    cases
        Models that are compared with autograd to the bit: kind of blocks, dtype, rate of dropout.
    step_hidden, step_length
        Of the models of whole steps.
    copy_bytes, products
        What the copies and the compute that shall overlap take: bytes of a message, matrix products.
    """

    device: str
    size: str = "full"
    hidden: int = 4096
    length: int = 2048
    rows: int = 2
    blocks: int = 2
    dtype: str = "bfloat16"
    rounds: int = 10
    backends: tuple[str, ...] = ("eager", "inductor")
    families: tuple[str, ...] = ("gpt2", "llama")
    cases: tuple[tuple[str, str, float], ...] = (
        ("gpt2", "float32", 0.1),
        ("llama", "float32", 0.0),
        ("llama", "bfloat16", 0.0),
    )
    step_hidden: int = 1024
    step_length: int = 512
    copy_bytes: int = 256 << 20
    products: int = 60


SIZES = {
    "full": Settings("cuda"),
    "tiny": Settings(
        "cpu",
        "tiny",
        hidden=64,
        length=32,
        blocks=1,
        dtype="float32",
        rounds=2,
        backends=("eager",),
        cases=(("gpt2", "float32", 0.1), ("llama", "bfloat16", 0.0)),
        step_hidden=32,
        step_length=16,
        copy_bytes=1 << 16,
        products=2,
    ),
}
"""Settings by name: ``full`` for a GPU, ``tiny`` to run every line on a CPU in seconds."""


@dataclass
class Found:
    """What a section found on one process. It begins as passed.

    Attributes
    ----------
    figures
        By name; JSON values.
    """

    figures: dict[str, object] = field(default_factory=dict)
    verdict: str = PASSED
    reasons: list[str] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        """Note that something is wrong, and why."""
        self.verdict = FAILED
        self.reasons.append(reason)

    def say(self, reason: str) -> None:
        """Add to the words of the verdict."""
        self.reasons.append(reason)

    @staticmethod
    def skipped(reason: str) -> Found:
        """Return what a section hands back that needs something which is not there."""
        return Found(verdict=SKIPPED, reasons=[reason])
