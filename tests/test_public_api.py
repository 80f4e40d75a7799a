"""What the package exports, with signatures, as golden text. docs/releases.md says what may change when."""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable, Iterator

import zbcompile

MADE_BY_OTHERS = ("Pipeline", "SavedForBackward", "Stage")
"""Classes whose constructors are not public."""
WIDE = 90


def described(name: str, value: object) -> Iterator[str]:
    """Yield the lines of a function or value; of a class its constructor, methods, properties and members."""
    if inspect.isclass(value) and issubclass(value, Exception):
        yield f"exception {name}({', '.join(base.__name__ for base in value.__bases__)})"
    elif inspect.isclass(value) and issubclass(value, enum.Enum):
        yield f"enum {name}: {', '.join(member.name for member in value)}"
    elif inspect.isclass(value):
        yield from [f"class {name}"] if name in MADE_BY_OTHERS else signed(f"class {name}", value)
        bases = [base for base in reversed(value.__mro__) if base.__module__.startswith("zbcompile")]
        own = {key: item for base in bases for key, item in vars(base).items() if key[0] != "_"}
        yield from (f"    {line}" for key in sorted(own) for line in member(key, own[key]))
    elif callable(value):
        yield from signed(f"def {name}", value)
    else:
        yield f"{name}: {type(value).__name__}"


def member(name: str, value: object) -> Iterator[str]:
    if isinstance(value, property):
        assert value.fget is not None
        yield f"{name} -> {inspect.signature(value.fget).return_annotation}"
    elif isinstance(value, staticmethod | classmethod):
        yield from signed(f"static {name}", value.__func__)
    elif inspect.isfunction(value):
        yield from signed(name, value)


def signed(words: str, value: Callable[..., object]) -> Iterator[str]:
    """Yield a signature: in one line, or one line per parameter where it is long."""
    signature = inspect.signature(value)
    whole = f"{words}{signature}".replace("'", "")
    if len(whole) <= WIDE:
        yield whole
        return
    yield f"{words}("
    keyword = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            keyword = True
            yield "    *,"
        yield f"    {parameter},".replace("'", "")
    yield f") -> {signature.return_annotation}"


def test_the_public_api_is_the_one_that_is_written_down(golden: Callable[[str, str], None]) -> None:
    lines = ["zbcompile"]
    for name in sorted(zbcompile.__all__, key=str.lower):
        lines += [f"  {line}" for line in described(name, getattr(zbcompile, name))]
    for path in zbcompile.PUBLIC_MODULES:
        module = importlib.import_module(path)
        lines += ["", path]
        for name in sorted(module.__all__):
            lines += [f"  {line}" for line in described(name, getattr(module, name))]
    golden("public_api.txt", "\n".join(lines) + "\n")


def test_public_names_come_from_one_list_and_have_docstrings() -> None:
    assert sorted(zbcompile._HOME_OF) == sorted(zbcompile.__all__)
    assert set(zbcompile.__all__) <= set(dir(zbcompile))
    for name in zbcompile.__all__:
        assert getattr(zbcompile, name).__doc__, name
    typed = inspect.getsource(zbcompile).split("if TYPE_CHECKING:")[1].split("__all__")[0]
    for name in zbcompile.__all__:
        assert f" {name}," in typed or f" {name}\n" in typed, f"{name} has no type for checkers"
