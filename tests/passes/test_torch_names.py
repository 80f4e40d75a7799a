"""Private names of torch stand in the files made for them, and every patch of torch is put back."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.compiler.stages import build_stages
from zbcompile.passes.torch_patches import PATCHES, Answers, Patch, applied, patched

ROOT = Path(zbcompile.__file__).parent
FILES = ("torch_private.py", "torch_patches.py")
OTHERS = {"_exit", "_getframe", "_typeshed", "_fields", "_experts_implementation"}
OTHERS |= {"_actions", "_choices_actions", "_option_string_actions", "_SubParsersAction"}
"""Names of Python's own modules (the second line: of argparse), and one of transformers."""
TABLES = {name for name in vars(nn.Module()) if name.startswith("_")}
"""Private names of a module: foreign also where a class of the package has such a name, but for its own."""


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    """Return the path and the syntax tree of every file of the package but those for private names."""
    files = sorted({*ROOT.rglob("*.py"), *(ROOT / "passes").rglob("*.py")})
    files = [path for path in files if path.name not in FILES]
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in files]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names() -> set[str]:
    """Return the private names that the package defines itself."""
    found: set[str] = set()
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return {name for name in found if is_private(name)}


def is_operator(node: ast.Attribute) -> bool:
    """Return whether an attribute is an operator of aten: `aten._unsafe_view` is one like any other."""
    return ast.unparse(node.value).lower().endswith("aten")


def foreign(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield private names of other packages that a file uses, as attributes, imports or text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            known = node.attr in own and (node.attr not in TABLES or ast.unparse(node.value) == "self")
            if not known and node.attr not in OTHERS and not is_operator(node):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom | ast.Import):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any(
                is_private(part) and part not in OTHERS for module in modules for part in module.split(".")
            ):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "getattr", "setattr", "delattr", "hasattr", "attrgetter", "attribute_replaced", "Patch",
        ):  # fmt: skip
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if any(isinstance(t, str) and is_private(t) and t not in own | OTHERS for t in texts):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_private_names_of_torch_are_in_the_files_for_them() -> None:
    own = own_names()
    found = {path: names for path, tree in sources() if (names := list(foreign(tree, own)))}
    assert found == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch._C",
        "from torch.utils import _pytree as pytree",
        "x.y._parameters",
        "torch.fx._lazy_graph_module",
        "getattr(parameter, '_post_accumulate_grad_hooks', None)",
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert len(list(foreign(ast.parse(code), {"_known"}))) == 1
    assert not list(foreign(ast.parse("aten._unsafe_view; self._known; x.__bool__; os._exit(1)"), {"_known"}))


def present() -> list[object]:
    """Return the object that every row of the table replaces, as its owner holds it."""
    found = [(patch.where(), patch.name) for patch in PATCHES]
    return [vars(owner).get(name, "not its own") for owner, name in found]


def differ(before: list[object], after: list[object]) -> list[str]:
    pairs = zip(PATCHES, before, after, strict=True)
    return [patch.name for patch, old, new in pairs if old is not new]


GROUPS = tuple(dict.fromkeys(patch.when for patch in PATCHES))


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_every_patch_is_put_back(error: type[BaseException] | None) -> None:
    before = present()
    inside: list[object] = []
    with contextlib.suppress(ValueError, KeyboardInterrupt), patched(*GROUPS):
        inside += present()
        if error is not None:
            raise error
    assert differ(before, present()) == []
    replaced = differ(before, inside)
    flags = {patch.name for patch, value in zip(PATCHES, before, strict=True) if value is False}
    assert {patch.name for patch in PATCHES} - set(replaced) <= flags  # these are False in and outside
    assert all(patch.why for patch in PATCHES)


def test_an_interrupt_while_patches_are_applied_undoes_those_that_are() -> None:
    class Owner:
        first, second = 1, 2

    def interrupted(given: object, answers: Answers) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return 20

    rows = [
        Patch("forward", lambda: Owner, "first", lambda given, answers: 10, "a test"),
        Patch("forward", lambda: Owner, "second", interrupted, "a test"),
    ]
    ran = False
    with pytest.raises(KeyboardInterrupt), applied(rows):
        ran = True
    assert not ran
    assert (Owner.first, Owner.second) == (1, 2)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_compile_leaves_torch_as_it_was(error: type[BaseException] | None) -> None:
    """Also where the model's own forward raises in the midst of the capture."""

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if error is not None and type(x) is not Tensor:
                raise error("mine")
            return torch.dropout(super().forward(x), 0.5, True)

    before = present()
    try:
        build_stages(Net(4, 4), 1, (torch.ones(2, 4),), loss_fn=lambda y, _: y.sum())
        assert error is None
    except (Exception, KeyboardInterrupt):
        assert error is not None
    assert differ(before, present()) == []
