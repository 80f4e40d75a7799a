"""The JSON Schemas (draft 2020-12) that the package ships, for other programs and editors.

Reading a file does not use them: the readers of this package check more, and need no dependency.
"""

from __future__ import annotations

from importlib.resources import files

from zbcompile.errors import UsageError

__all__ = ["SCHEMAS", "schema_text"]

SCHEMAS = ("schedule", "profile", "measured")


def schema_text(name: str) -> str:
    """The schema of a format by its short name. Raises `UsageError` for a name that is none."""
    if name not in SCHEMAS:
        raise UsageError(f"no schema is called {name[:40]!r}", needed=" or ".join(SCHEMAS))
    return files("zbcompile.formats").joinpath(f"{name}.schema.json").read_text(encoding="utf-8")
