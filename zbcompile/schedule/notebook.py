"""How schedules and solutions show themselves in notebooks."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

__all__ = ["Pictured"]


class _Printer(Protocol):
    """IPython's pretty printer."""

    def text(self, text: str) -> object: ...


class Pictured:
    """Draws itself in a notebook, and as text on IPython's prompt.

    Rooms import downward. The notebook asks here, and the picture is drawn in `zbcompile.show`, which is
    above: it is found by its name when it is asked for, and nothing else of this room knows it.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(import_module("zbcompile.show.notebook").notebook_html(self))

    def _repr_pretty_(self, printer: _Printer, cycle: bool) -> None:
        printer.text(str(import_module("zbcompile.show.notebook").notebook_text(self)))
