"""Watching the compiler: an observer is called after each step, before the next one begins."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Observer", "quiet"]

Observer = Callable[[str, object], None]
"""Called with the name of a step and its artifact, as that step left it.

A name with a dot (``split_backward.joint``) is of a part of a step, and comes once per stage and rewrite.
"""


def quiet(name: str, artifact: object) -> None:
    """Do nothing: the default observer."""
