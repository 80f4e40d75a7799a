"""A folder is replaced whole, also where the file system cannot exchange two names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zbcompile.errors import UsageError
from zbcompile.formats import folders


def fill(target: Path, text: str) -> None:
    place = folders.begin(str(target), lambda name: name == "file")
    (Path(place) / "file").write_text(text)


@pytest.mark.parametrize("exchanges", [True, False])
def test_old_or_new_whatever_was_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    target = tmp_path / "deep" / "saved"
    for text in ("one", "two"):
        fill(target, "half")  # and killed
        fill(target, text)
        folders.finish(str(target))
        assert (target / "file").read_text() == text
        assert os.listdir(target.parent) == ["saved"]


def test_killed_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    target, rename = tmp_path / "saved", os.rename
    fill(target, "one")
    folders.finish(str(target))

    def killed(source: str, place: str) -> None:
        if place == str(target):
            raise KeyboardInterrupt
        rename(source, place)

    fill(target, "two")
    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        folders.finish(str(target))
    monkeypatch.setattr(os, "rename", rename)
    assert not target.exists()
    assert (Path(folders.present(str(target))) / "file").read_text() == "one"
    fill(target, "three")
    assert (Path(folders.present(str(target))) / "file").read_text() == "one"
    folders.finish(str(target))
    assert (Path(folders.present(str(target))) / "file").read_text() == "three"
    assert os.listdir(tmp_path) == ["saved"]


def test_what_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/notes").write_text("mine")
    with pytest.raises(UsageError, match=r"(?s)something else.*saved/notes"):
        fill(tmp_path / "saved", "one")
    with pytest.raises(UsageError, match="cannot write: Not a directory"):
        fill(tmp_path / "saved/notes", "one")
    assert (tmp_path / "saved/notes").read_text() == "mine"
