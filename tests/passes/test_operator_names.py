"""Names of operators stand in the table of facts, and in the files listed here, each for a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zbcompile.passes import ops

ROOT = Path(ops.__file__).parent

ALLOWED: dict[str, tuple[str, str]] = {
    "capture/constant_masks.py": (
        "scaled_dot_product_attention.default aten_name _unsafe_view",
        "its own pattern: attention with a mask, and transformers' repetition of keys and values",
    ),
    "capture/ctc_loss.py": ("ctc_loss", "the attribute of torch that it replaces"),
    "capture/inline.py": ("clone.default", "inserted: a copy of a batch that the model changes"),
    "capture/refusals.py": ("_local_scalar_dense is_nonzero", "words of torch's errors"),
    "joint/cheaper_calls.py": (
        "aten view.default expand.default cat.default add.Tensor",
        "inserted; the sum of slices that it rewrites is one like that which it inserts",
    ),
    "joint/flexible_views.py": ("reshape.default", "inserted"),
    "joint/recurrent.py": (
        "lstm.input gru.input rnn_tanh.input rnn_relu.input gru_cell.default mkldnn_rnn_layer.default",
        "which of its kernels computes which call",
    ),
    "joint/refusals.py": ("aten_name", "told to the user"),
    "joint/separate_gradients.py": ("clone.default", "inserted"),
    "kernel_strides.py": ("batch_norm batch_norm_backward", "rules of strides that bear these names"),
    "op_costs.py": ("aten_name", "looked up in the rates of a device"),
    "partition/call_costs.py": ("add.Tensor", "the sum of gradients whose cost it counts"),
    "profile/cpu_rates.py": ("native_dropout _softmax", "the functions whose rates it measures"),
    "split/boxed.py": ("clone.default", "inserted"),
    "split/in_place.py": ("aten", "looks an operator's form in place up by its name"),
    "split/recompute.py": ("cat.default", "what torch puts behind an all-gather along another dimension"),
    "torch_patches.py": (
        "aten dropout.default empty_strided.default index _linalg_check_errors upsample_linear1d "
        "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa "
        "_upsample_bicubic2d_aa",
        "what it patches",
    ),
    "torch_private.py": (
        "_ctc_loss.Tensor _ctc_loss_backward.Tensor _linalg_check_errors.default "
        "_scaled_dot_product_attention_math.default",
        "private operators under public names",
    ),
}
"""File -> the operators that it names, and why. What is *true* of an operator belongs into `ops`."""

_SCHEMAS = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
_OVERLOADS = {f"{schema.name[6:]}.{schema.overload_name or 'default'}" for schema in _SCHEMAS}
_PACKETS = {schema.name[6:] for schema in _SCHEMAS if "_" in schema.name}
"""Not those of one word, such as ``view`` or ``copy``: Python has them, too."""


def operators_in(source: str) -> Iterator[str]:
    """Yield what a file says of operators: attributes of `torch.ops`, their names as strings, `aten_name`."""
    tree = ast.parse(source)
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if id(node) not in silent and path.startswith(
                ("torch.ops.aten", "torch.ops.prims", "aten.", "prims.")
            ):
                yield path.removeprefix("torch.ops.").removeprefix("aten.")
            silent |= (
                {id(node.value)} if isinstance(node.value, ast.Attribute) or id(node) in silent else set()
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            name = node.value.replace("::", ".")
            if name.startswith(("aten.", "prims.")) or name in _OVERLOADS or name in _PACKETS:
                yield name.removeprefix("aten.")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "aten_name":
            yield "aten_name"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("node.target is torch.ops.aten.mm.default", ["mm.default"]),
        ("aten = torch.ops.aten; node.target == aten.mm", ["aten", "mm"]),
        ("str(node.target) == 'aten.mm.default'", ["mm.default"]),
        ("'mm.default' in str(node.target)", ["mm.default"]),
        ("node.target.__name__ == 'copy_'", ["copy_"]),
        ("aten_name(node.target) == 'mm'", ["aten_name"]),
        ("getattr(torch.ops.aten, name)", ["aten"]),
        ("def f():\n    'Replace aten.mm.default.'\n    return facts(node.target).heavy", []),
    ],
)
def test_a_name_is_found_however_it_is_written(source: str, found: list[str]) -> None:
    assert sorted(operators_in(source)) == sorted(found)


def test_operators_are_named_where_a_reason_is_given_and_nowhere_else() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}
    del files["ops.py"]
    found = {file: set(operators_in(source)) for file, source in files.items()}
    allowed = {file: set(names.split()) for file, (names, _) in ALLOWED.items()}
    assert {file: names for file, names in found.items() if names} == allowed
