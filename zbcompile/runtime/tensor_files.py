"""Tensors by name in safetensors files: one file, or a directory with an index. No pickle is ever read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from torch import Tensor

from zbcompile.errors import FormatError, UsageError

__all__ = ["TensorFiles", "write_tensors"]

_INDEX = "model.safetensors.index.json"


class TensorFiles(Mapping[str, Tensor]):
    """Name -> tensor, read when asked for; only the bytes of that tensor are read.

    Parameters
    ----------
    path
        A ``.safetensors`` file, or a directory that holds ``model.safetensors.index.json`` or such files.

    Raises
    ------
    UsageError
        The file is of another kind, or the safetensors package is missing.
    FormatError
        A file is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file_of = self._index()

    def _index(self) -> dict[str, Path]:
        """Return the file of each name."""
        if self.path.is_file():
            return dict.fromkeys(_names(self.path), self.path)
        index = self.path / _INDEX
        if index.is_file():
            return _read_index(index)
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise UsageError("no safetensors files there", where=str(self.path))
        return {name: file for file in files for name in _names(file)}

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        with _opened(file) as tensors:
            if name not in tensors.keys():  # noqa: SIM118
                raise FormatError(f"the index places {name!r} in a file that lacks it", where=str(file))
            return tensors.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def write_tensors(path: str, tensors: Mapping[str, Tensor], same: Mapping[str, str]) -> None:
    """Write a safetensors file whole, as ``safetensors.torch.load_model`` and transformers read it.

    Parameters
    ----------
    path
        The file; its name ends in ``.safetensors``.
    tensors
        By name, none sharing memory with another.
    same
        Another name of a tensor -> the name that it is written under.

    Raises
    ------
    UsageError
        The file has another kind of name, or the safetensors package is missing.
    OSError
        It cannot be written.
    """
    _require_suffix(Path(path))
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UsageError(
            "writing safetensors files needs the safetensors package", fix="install it"
        ) from error
    temporary = f"{path}.zbcompile-partial"
    try:
        dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(dense, temporary, {"format": "pt", **same})
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _read_index(index: Path) -> dict[str, Path]:
    """Return the file of each name. An index is data from someone else: no file name may leave its folder."""
    try:
        table = json.loads(index.read_text())["weight_map"]
        named = {str(name): Path(str(file)) for name, file in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"not an index of safetensors files: {error}", where=str(index)) from error
    for file in named.values():
        if file.name != str(file) or file.suffix != ".safetensors":
            raise FormatError(
                f"the index names {str(file)!r}, not a safetensors file beside it", where=str(index)
            )
    return {name: index.parent / file for name, file in named.items()}


def _names(file: Path) -> list[str]:
    with _opened(file) as tensors:
        return list(tensors.keys())


class _OpenFile(Protocol):
    """What is used of an open safetensors file; the package has no types."""

    def keys(self) -> Iterable[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...


def _opened(file: Path) -> AbstractContextManager[_OpenFile]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UsageError(
            "reading safetensors files needs the safetensors package", fix="install it"
        ) from error
    _require_suffix(file)
    try:
        return cast("AbstractContextManager[_OpenFile]", safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise FormatError(f"not a readable safetensors file: {error}", where=str(file)) from error


def _require_suffix(file: Path) -> None:
    if file.suffix != ".safetensors":
        raise UsageError(
            "only safetensors files are read and written",
            where=str(file),
            fix="save the weights as safetensors, in a file NAME.safetensors",
        )
