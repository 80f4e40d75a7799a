"""Hints on near misses: what a mistyped command, option or choice was probably meant to be."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

__all__ = ["hint"]

_LIKENESS = 0.6
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)


def hint(message: str, options: Collection[str]) -> str:
    """Return what to say beside a message of the parser, such as ``did you mean --microbatches?``.

    Parameters
    ----------
    message
        The message.
    options
        The options that the command has.

    Returns
    -------
    str
        Empty where nothing is near.
    """
    choice, unknown = _CHOICE.search(message), _UNKNOWN.search(message)
    if choice is not None:
        return _meant([choice.group(1)], re.findall(r"[\w.-]+", choice.group(2)))
    if unknown is not None:
        words = (word.partition("=")[0] for word in unknown.group(1).split())
        return _meant((word for word in words if word.startswith("-")), options)
    return ""


def _meant(words: Iterable[str], known: Collection[str]) -> str:
    """Return the known words that are nearest to some others, as a question; empty if none is near."""
    found: dict[str, None] = {}
    for word in words:
        near = get_close_matches(word[:60].lower(), known, 1, _LIKENESS)
        near = near or sorted(k for k in known if len(word) > 3 and k.startswith(word))[:1]
        found.update(dict.fromkeys(near))
    return f"did you mean {' and '.join(found)}?" if found else ""
