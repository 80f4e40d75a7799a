"""What a model's forward does while it is traced that a graph cannot hold: seen at once, named by line.

Every torch function passes through `TraceGuard`. It puts a parameter that the code holds outside of the modules
(in a list, a closure) in the place of its traced stand-in, turns ``.data`` into ``.detach()``, refuses what
would lose a gradient without a word, and remembers the call that failed. `unchanged` refuses state that is
kept from call to call outside of parameters and buffers: the graph would keep its first value for ever.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from zbcompile.errors import CaptureError
from zbcompile.passes import torch_private
from zbcompile.passes.provenance import place_of_caller

__all__ = ["Changes", "TraceGuard", "attributes_kept", "random_kept", "repeated", "unchanged"]

_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_READS = (torch.Tensor.item, torch.Tensor.tolist)
_PLAIN_NUMBERS = (bool, int, float)


class TraceGuard(TorchFunctionMode):
    """Active while the forward is traced.

    stand_ins : id of a parameter or buffer -> what stands for it in the trace. After a failure ``failed`` is
    the name of the torch function that raised first, ``read`` the last one that gave Python a number;
    ``transform`` is where a torch.func transform was seen, ``suspect`` where a value became a leaf.
    """

    def __init__(self, on_planned_device: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.on_planned_device = on_planned_device
        self.failed = ""
        self.read = self.suspect = ""
        self.transform = ""
        self.depth = torch_private.transform_depth()
        self.backends = _backends()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {name: self._seen(value) for name, value in (kwargs or {}).items()}
        taken = tuple(self._seen(value) for value in args)
        if not self.transform and torch_private.transform_depth() > self.depth:
            self.transform = place_of_caller()
        if func in _ATTENTION and _backends() != self.backends:
            return self._attention(func, taken, given)
        if func == _GET_DATA:
            return taken[0].detach()
        if func == _SET_DATA:
            raise CaptureError(
                "cannot capture an assignment to .data",
                where=place_of_caller(),
                fix="change a buffer with copy_(), or a parameter after the step",
            )
        if func in _READS:
            self.read = _name(func)
        if func is torch.Tensor.requires_grad_ and not self.suspect:
            self.suspect = place_of_caller()
        try:
            return func(*taken, **given)
        except Exception:
            self.failed = self.failed or _name(func)
            raise

    def _attention(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Attention inside a choice of kernels that the graph would not remember."""
        flash, _, math, _ = _backends()
        if func is F.scaled_dot_product_attention and math and not flash and args[0].device.type == "cpu":
            return torch_private.math_attention(*args, **given)
        raise CaptureError(
            "cannot capture a choice of attention kernels inside the model (sdpa_kernel)",
            where=place_of_caller(),
            fix="put sdpa_kernel(...) around the calls of the pipeline instead",
        )

    def _seen(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            if not any(isinstance(item, Tensor | tuple | list) for item in value):
                return value
            items = [self._seen(item) for item in value]
            same = all(a is b for a, b in zip(items, value, strict=True))
            return value if same or type(value) not in (tuple, list) else type(value)(items)
        if type(value) is Tensor or type(value) is nn.Parameter:
            found = self.on_planned_device.get(id(value))
            if found is None and value.requires_grad and not torch_private.is_wrapped(value):
                raise CaptureError(
                    f"a tensor {list(value.shape)} that requires a gradient is no parameter of the model: "
                    "its gradient would be lost",
                    where=place_of_caller(),
                    fix="register it as nn.Parameter (lists of modules and parameters as nn.ModuleList and "
                    "nn.ParameterList), or pass a loss that is a module as loss_fn itself",
                )
            return value if found is None else found
        if isinstance(value, torch.Generator):
            raise CaptureError(
                "cannot capture a random draw from a torch.Generator",
                where=place_of_caller(),
                fix="draw without generator=: the pipeline gives every microbatch a random stream of its own",
            )
        return value


def _backends() -> tuple[bool, ...]:
    """Which attention kernels are allowed now: flash, memory-efficient, math, cuDNN."""
    cuda: Any = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _name(func: Any) -> str:
    name = resolve_name(func) or getattr(func, "__qualname__", "") or getattr(func, "__name__", "")
    return str(name).removesuffix(".__get__")


class Changes:
    """What the forward assigned to attributes: paths of plain tensors, and (path of the module, name) of
    plain numbers -> the value before and after."""

    def __init__(self) -> None:
        self.tensors: set[str] = set()
        self.numbers: dict[tuple[str, str], tuple[Any, Any]] = {}


@contextlib.contextmanager
def unchanged(root: nn.Module, changes: Changes) -> Iterator[None]:
    """Refuse a block that replaces modules or draws random numbers outside of torch.

    Raises CaptureError with the module path. Attributes that were given another tensor or number are noted.
    """
    before = {(path, name): value for path, name, value in _attributes(root)}
    modules = dict(root.named_modules())
    changes.numbers.clear()
    states = _random_states()
    yield
    for kind, state in _random_states().items():
        if state != states[kind]:
            raise CaptureError(
                f"the forward draws or seeds random numbers with {kind}: the graph would repeat the first",
                fix="draw with torch functions; the pipeline seeds them for every step and microbatch",
            )
    for path, module in root.named_modules():
        if modules.get(path) is not module:
            raise CaptureError(
                f"the forward replaces or adds the module {type(module).__name__}",
                where=path,
                fix="run the model once on such a batch before it is compiled",
            )
    for path, name, value in _attributes(root):
        old = before.get((path, name))
        if old is value or old is None:
            continue
        where = f"{path}.{name}".lstrip(".")
        if isinstance(value, Tensor):
            changes.tensors.add(where)
        elif isinstance(old, _PLAIN_NUMBERS) and old != value:
            changes.numbers[path, name] = (old, value)


def repeated(root: nn.Module, changes: Changes, trace: Callable[[], Any], first: Any) -> Any:
    """``first``, or the second trace of a forward that set plain attributes as it would set them again.

    Raises CaptureError with the module path where the second trace changes them too, or differs.
    """
    found = dict(changes.numbers)
    if not found:
        return first
    for (path, name), (_, value) in found.items():
        setattr(root.get_submodule(path), name, value)
    second = trace()
    if not changes.numbers and str(second.graph) == str(first.graph):
        return second
    (path, name), (old, value) = next(iter((changes.numbers or found).items()))
    old, value = found.get((path, name), (old, value))
    raise CaptureError(
        f"the forward changes attribute {name!r} from {old} to {value}: the graph would keep {old}",
        where=f"{path}.{name}".lstrip("."),
        fix="count in a buffer, or change it outside of the forward",
    )


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Give Python's and numpy's random numbers back the state that they had."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])


@contextlib.contextmanager
def attributes_kept(*roots: nn.Module) -> Iterator[None]:
    """Give all modules below ``roots`` back the attributes that they had, and those that are dicts (caches,
    hooks, submodules) their entries."""
    tables = {id(module): vars(module) for root in roots for module in root.modules()}
    inner = [item for table in tables.values() for item in table.values() if isinstance(item, dict)]
    tables |= {id(item): item for item in inner}
    before = {key: dict(table) for key, table in tables.items()}
    try:
        yield
    finally:
        for key, table in tables.items():
            table.clear()
            table.update(before[key])


def _attributes(root: nn.Module) -> Iterator[tuple[str, str, Any]]:
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, (Tensor, *_PLAIN_NUMBERS)) and name != "training":
                yield path, name, value


def _random_states() -> dict[str, object]:
    states: dict[str, object] = {"the random module": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    states["torch.manual_seed"] = torch_private.random_state()
    return states
