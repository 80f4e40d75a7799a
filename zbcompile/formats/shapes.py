"""What a value in a file may be. A shape reads it, writes it, and states its JSON Schema (draft 2020-12)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zbcompile.errors import FormatError
from zbcompile.formats import amounts
from zbcompile.formats.amounts import Unit
from zbcompile.formats.fields import MAX_TEXT, guarded, integer, items, plain, quoted, readable, text
from zbcompile.schedule.limits import MAX_AMOUNT

__all__ = [
    "AMOUNT",
    "NO_LIMIT",
    "RATE",
    "SIZE",
    "TEXT",
    "TIME",
    "Flag",
    "Json",
    "JsonObject",
    "ListOf",
    "Measure",
    "OneOrEach",
    "Schema",
    "Shape",
    "Whole",
    "Word",
    "refer",
    "row_schema",
]

NO_LIMIT = "none"
"""What says as null does that there is no value."""

T = TypeVar("T")
Schema = dict[str, object]

# Shapes and records are neither compared nor printed: the code that `dataclass` makes for that takes time at
# every start of a command.


class Shape(ABC, Generic[T]):
    """What a JSON value may be, and the value of type T that it stands for.

    Attributes
    ----------
    name
        Under which schemas define the shape once and refer to it; empty: it is written out where it is used.
    """

    __slots__ = ()
    name: str = ""

    @abstractmethod
    def read(self, value: object, where: str) -> T:
        """Return what a JSON value stands for.

        Parameters
        ----------
        where
            The value's place in the file, for messages.

        Raises
        ------
        FormatError
            The value has another shape; the message names the place.
        """

    def write(self, value: T) -> object:
        """Return the JSON value that `read` reads.

        Raises
        ------
        FormatError
            A file cannot carry the value; the message names the field.
        """
        return value

    @abstractmethod
    def schema(self, definitions: Schema) -> Schema:
        """Return the JSON Schema of the shape, and add to ``definitions`` what it refers to."""


def refer(shape: Shape[Any], definitions: Schema) -> Schema:
    """Return the schema of a shape, or a reference to its definition where it has a name."""
    if not shape.name:
        return shape.schema(definitions)
    if shape.name not in definitions:
        definitions[shape.name] = shape.schema(definitions)
    return {"$ref": f"#/$defs/{shape.name}"}


def row_schema(definitions: Schema, *shapes: Shape[Any]) -> Schema:
    """Return the schema of a list whose entries have one shape each."""
    return {
        "type": "array",
        "prefixItems": [refer(shape, definitions) for shape in shapes],
        "minItems": len(shapes),
        "maxItems": len(shapes),
        "items": False,
    }


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Whole(Shape[int]):
    """A whole number in a range; true, 1.0 and "1" are none."""

    low: int = 0
    high: int = MAX_AMOUNT
    name: str = ""

    def read(self, value: object, where: str) -> int:
        return integer(value, where, low=self.low, high=self.high)

    def schema(self, definitions: Schema) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Measure(Shape[int]):
    """A whole number of ns or bytes, or text with a unit: 18500000 or "18.5ms". Numbers are written."""

    unit: Unit
    name: str = ""

    def read(self, value: object, where: str) -> int:
        if isinstance(value, str):
            words = text(value, where)
            return guarded(lambda: self.unit.read(words), where)
        return integer(value, where)

    def schema(self, definitions: Schema) -> Schema:
        whole: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_AMOUNT}
        return {"oneOf": [whole, {"type": "string", "pattern": self.unit.pattern}]}


class _Text(Shape[str]):
    """Printable text of at most 1000 characters; other text is written so that it can be read again."""

    name = "text"

    def read(self, value: object, where: str) -> str:
        return text(value, where)

    def write(self, value: str) -> str:
        return readable(value)

    def schema(self, definitions: Schema) -> Schema:
        return {"type": "string", "maxLength": MAX_TEXT}


class Flag(Shape[bool]):
    """True or false."""

    def read(self, value: object, where: str) -> bool:
        if not isinstance(value, bool):
            raise FormatError("expected true or false", where=where, given=quoted(value))
        return value

    def schema(self, definitions: Schema) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Word(Shape[str]):
    """One of some words.

    Attributes
    ----------
    noun
        What they are, for messages.
    """

    noun: str
    choices: Sequence[str]

    def read(self, value: object, where: str) -> str:
        word = text(value, where)
        if word not in self.choices:
            needed = " or ".join(self.choices)
            raise FormatError(f"unknown {self.noun} {quoted(word)}", where=where, needed=needed)
        return word

    def schema(self, definitions: Schema) -> Schema:
        return {"enum": list(self.choices)}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ListOf(Shape[Any]):
    """A list of entries of one shape.

    Attributes
    ----------
    most, least
        How many entries there are. It is ``build`` that refuses too few, in its own words.
    build, take
        Make the value from a tuple of entries, and the entries from the value.
    """

    of: Shape[Any]
    most: int
    least: int = 0
    build: Callable[[tuple[Any, ...]], Any] = tuple
    take: Callable[[Any], Iterable[Any]] = tuple

    def read(self, value: object, where: str) -> Any:
        read = self.of.read
        found = tuple([read(v, f"{where}[{i}]") for i, v in enumerate(items(value, where, high=self.most))])
        return guarded(lambda: self.build(found), where)

    def write(self, value: Any) -> list[object]:
        return items([self.of.write(v) for v in self.take(value)], "", high=self.most)

    def schema(self, definitions: Schema) -> Schema:
        least: Schema = {"minItems": self.least} if self.least else {}
        return {"type": "array", **least, "maxItems": self.most, "items": refer(self.of, definitions)}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OneOrEach(Shape[tuple[Any, ...]]):
    """One value for all, or a list with a value or null for each; null says nothing.

    ``7  -->  (7,)``, ``[7, null]  -->  (7, None)``, ``null  -->  ()``. "none" says the same as null, which
    TOML does not have.
    """

    of: Shape[Any]
    most: int

    def read(self, value: object, where: str) -> tuple[Any, ...]:
        if value in (None, NO_LIMIT):
            return ()
        if not isinstance(value, list):
            return (self.of.read(value, where),)
        each = enumerate(items(value, where, high=self.most))
        return tuple(None if v in (None, NO_LIMIT) else self.of.read(v, f"{where}[{i}]") for i, v in each)

    def write(self, value: tuple[Any, ...]) -> list[object]:
        return [None if v is None else self.of.write(v) for v in value]

    def schema(self, definitions: Schema) -> Schema:
        one, nothing = refer(self.of, definitions), {"enum": [None, NO_LIMIT]}
        each = {"type": "array", "maxItems": self.most, "items": {"oneOf": [one, nothing]}}
        return {"oneOf": [one, nothing, each]}


class Json(Shape[object]):
    """Any JSON value with printable text, finite numbers and bounded nesting."""

    def read(self, value: object, where: str) -> object:
        return plain(value, where)

    def write(self, value: object) -> object:
        return plain(value, "")

    def schema(self, definitions: Schema) -> Schema:
        return {}


class JsonObject(Shape[Mapping[str, object]]):
    """An object with any JSON values."""

    def read(self, value: object, where: str) -> Mapping[str, object]:
        found = plain(value, where)
        if not isinstance(found, dict):
            raise FormatError("expected an object", where=where)
        return found

    def write(self, value: Mapping[str, object]) -> object:
        return plain(value, "")

    def schema(self, definitions: Schema) -> Schema:
        return {"type": "object"}


AMOUNT = Whole(name="amount")
"""Nanoseconds, bytes and other numbers that only the format bounds."""

TIME, SIZE, RATE = Measure(amounts.TIME, "time"), Measure(amounts.SIZE, "size"), Measure(amounts.RATE, "rate")
"""Nanoseconds, bytes, and bytes per second, as numbers or with a unit."""

TEXT = _Text()
