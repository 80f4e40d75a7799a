"""One small tree of errors. Each says what, where, needed against given, and what to change."""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "CheckError",
    "CutError",
    "DataError",
    "FormatError",
    "InfeasibleError",
    "NoOrderError",
    "PipelineError",
    "ShapeError",
    "SplitError",
    "UsageError",
    "ZBCompileError",
    "printable",
]


def printable(text: str) -> str:
    """Return a text with every character that a terminal obeys written as its escape; ends of lines stay.

    ``ESC [ 2 J  -->  \\x1b[2J``
    """
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)


class ZBCompileError(Exception):
    """Base of every error that this package raises on purpose.

    Parameters
    ----------
    what
        One sentence: what cannot be done.
    where
        Rank, stage, microbatch, parameter, source line or file, as far as known.
    needed, given
        The two sides of a failed comparison, in the same unit.
    fix
        What the reader can change.

    Attributes
    ----------
    exit_code
        What the command line ends with; docs/reference/cli.md lists the codes.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        needed: object = None,
        given: object = None,
        fix: str = "",
    ) -> None:
        self.what, self.where, self.needed, self.given, self.fix = what, where, needed, given, fix
        super().__init__(what)

    def __str__(self) -> str:
        """Write the error for people. What it quotes may come from a file: no control character gets out."""
        lines = [f"{self.what} ({self.where})" if self.where else self.what]
        sides = (("needed", self.needed), ("given", self.given))
        known = [f"{word}: {value}" for word, value in sides if value is not None]
        if known:
            lines.append("; ".join(known))
        if self.fix:
            lines.append(f"to fix: {self.fix}")
        return printable("\n  ".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the keyword parts when an error crosses a process boundary."""
        return _rebuild, (type(self), self.what, self.where, self.needed, self.given, self.fix)


def _rebuild(
    cls: type[ZBCompileError], what: str, where: str, needed: object, given: object, fix: str
) -> ZBCompileError:
    return cls(what, where=where, needed=needed, given=given, fix=fix)


class UsageError(ZBCompileError, ValueError):
    """An argument that makes no sense: unknown name, wrong count, wrong type. Also a `ValueError`."""

    exit_code = 2


class FormatError(UsageError):
    """A file that is broken, foreign or of another version."""


class CheckError(ZBCompileError):
    """A schedule that is incomplete or out of order, deadlocks, or exceeds a cap."""


class InfeasibleError(ZBCompileError):
    """No order fits under the cap."""


class NoOrderError(ZBCompileError):
    """The time limit passed before any order was found."""

    exit_code = 3


class CaptureError(ZBCompileError):
    """The model cannot be captured as one graph."""


class CutError(ZBCompileError):
    """The graph cannot be cut into the stages asked for."""


class SplitError(ZBCompileError):
    """A stage's backward cannot be split into B and W."""


class ShapeError(ZBCompileError, ValueError):
    """A tensor whose shape, dtype or stride is not the one compiled for. Also a `ValueError`."""


class DataError(ZBCompileError, ValueError):
    """Data for which the model's own forward raises. Also a `ValueError`."""


class PipelineError(ZBCompileError):
    """A step that failed on some rank: the same error is raised on every surviving rank."""
