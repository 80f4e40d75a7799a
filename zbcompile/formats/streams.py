"""The standard streams: data on standard output, talk on standard error, both safe when closed or full.

Everything that a command prints goes through here. Data that cannot be written is an error with an exit code;
talk that cannot be written is dropped. Talk is printable: what a file says cannot steer the terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from zbcompile.errors import FormatError, UsageError, printable

__all__ = [
    "ReaderGoneError",
    "check_output",
    "hold_descriptors",
    "read_input",
    "rewrite_line",
    "say",
    "talk",
    "write_output",
]

_OUTPUT = "standard output"
_INPUT = "standard input"
_PLAIN = str.maketrans({"µ": "u", "·": "|"})


class ReaderGoneError(UsageError):
    """The program that reads standard output has ended."""


def hold_descriptors() -> None:
    """Open the null device for each closed one of the descriptors 0, 1 and 2.

    A file that is opened later would get such a number, and libraries would write their messages into it.
    Python's own streams stay as they are: None.
    """
    with contextlib.suppress(OSError):
        number = os.open(os.devnull, os.O_RDWR)
        while number <= 2:
            number = os.open(os.devnull, os.O_RDWR)
        os.close(number)


def reason(error: OSError | ValueError) -> str:
    """Return why a file or stream failed, without its name."""
    return getattr(error, "strerror", None) or str(error)


def say(*words: object) -> None:
    """Write a line to standard error; nothing where that is closed or full."""
    talk(printable(" ".join(map(str, words))) + "\n")


def rewrite_line(text: str) -> None:
    """Write a line over the last one on a terminal; an empty text ends it."""
    talk(f"\r\x1b[2K{printable(text)}" if text else "\n")


def talk(text: str) -> None:
    """Write a text to standard error as it is; nothing where that is closed or full."""
    stream = sys.stderr
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        _silence(stream)


def check_output() -> None:
    """Check that standard output is open for writing, before the work for it begins.

    Raises
    ------
    UsageError
        It is not.
    """
    stream = sys.stdout
    if stream is None or stream.closed:
        raise UsageError("cannot write: it is closed", where=_OUTPUT, fix="open it, or send it to a file")
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # a stream of the caller's own, without a descriptor
        return
    try:
        os.write(number, b"")
    except OSError as error:
        raise UsageError(f"cannot write: {reason(error)}", where=_OUTPUT) from None


def write_output(text: str) -> None:
    """Write to standard output. What its encoding does not have is replaced.

    Raises
    ------
    ReaderGoneError
        Nobody reads the pipe any more.
    UsageError
        It is closed, full or broken.
    """
    check_output()
    stream = sys.stdout
    try:
        stream.write(_encodable(text, stream))
        stream.flush()
    except (OSError, ValueError) as error:
        _silence(stream)
        if isinstance(error, BrokenPipeError):
            raise ReaderGoneError("the reader has ended", where=_OUTPUT) from None
        raise UsageError(f"cannot write: {reason(error)}", where=_OUTPUT) from None


def read_input(limit_bytes: int) -> bytes:
    """Return the bytes of standard input, at most ``limit_bytes`` of them.

    Raises
    ------
    FormatError
        It is closed.
    OSError
        It cannot be read.
    """
    stream = sys.stdin
    if stream is None or stream.closed:
        raise FormatError("cannot read: it is closed", where=_INPUT)
    return stream.buffer.read(limit_bytes)


def _encodable(text: str, stream: TextIO) -> str:
    """Return the text with a stand-in for every character that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text


def _silence(stream: TextIO) -> None:
    """Send a broken stream to the null device, so that the end of the process does not stumble over it."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
