"""Reading and writing of whole files and of the standard streams: checked first, whole or not at all."""

from __future__ import annotations

import io
import os
import stat
import sys
from pathlib import Path

import pytest

from zbcompile.errors import CheckError, FormatError, UsageError, printable
from zbcompile.formats import files, streams
from zbcompile.formats.files import Output, check_distinct

ESCAPES = "\x1b[2J\x07\x9b31m\u202e\x7f"


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.json"
    files.write_text(target, "one\n")
    target.chmod(0o640)
    files.write_text(target, "two\n")
    assert target.read_text() == "two\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(UsageError, match="No space left"):
        files.write_text(target, "three\n")
    assert target.read_text() == "two\n"
    assert os.listdir(tmp_path) == ["a.json"]


def test_writing_keeps_links_and_reaches_pipes(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    files.write_text("/dev/null", "nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_places_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="No such file") as caught:
        files.read_text(tmp_path / "absent.json")
    assert "absent.json" in str(caught.value)
    with pytest.raises(FormatError, match="directory"):
        files.read_text(tmp_path)
    (tmp_path / "long").write_text("x" * 101)
    (tmp_path / "bytes").write_bytes(b"{}\xff")
    with pytest.raises(FormatError, match="too large"):
        files.read_text(tmp_path / "long", limit_bytes=100)
    with pytest.raises(FormatError, match="byte 2 is 0xff"):
        files.read_text(tmp_path / "bytes")
    with pytest.raises(UsageError, match="No such file"):
        files.write_text(tmp_path / "absent" / "x.json", "")


def unwritable(folder: Path) -> dict[str, str]:
    """Names that cannot be written, with the reason."""
    (folder / "file").write_text("kept")
    (folder / "fixed").write_text("kept")
    (folder / "fixed").chmod(0o444)
    (folder / "loop").symlink_to("loop")
    return {
        str(folder): "Is a directory",
        f"{folder}/absent/x": "No such file",
        f"{folder}/absent/": "Is a directory",
        f"{folder}/file/x": "Not a directory",
        f"{folder}/fixed": "read-only",
        f"{folder}/loop": "symbolic links",
        f"{folder}/{'n' * 300}": "too long",
        f"{folder}/a\x00b": "null",
        "/dev/fd/987": "Bad file descriptor",
        "/dev/stdin": "Bad file descriptor",
        "": "the name is empty",
    }


def test_an_output_is_checked_before_the_work_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setitem(files._STANDARD, "stdin", number)
    names = unwritable(tmp_path)
    before = sorted(os.listdir(tmp_path))
    for name, why in names.items():
        with pytest.raises(UsageError, match=why):
            Output.to(name)
    Output.to(tmp_path / "new")
    Output.to(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "file").read_text() == "kept"
    os.close(number)


def test_a_folder_that_takes_no_new_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", closed)
    with pytest.raises(UsageError, match="Permission denied"):
        Output.to(tmp_path / "x")


def test_a_temporary_file_that_is_there_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["stale", "stale", "fresh", "stale", "second"])
    monkeypatch.setattr("secrets.token_hex", lambda count: next(names))
    stale = tmp_path / f".zbcompile-{os.getpid()}-stale.tmp"
    stale.write_text("another's")
    files.write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "new"
    assert stale.read_text() == "another's"
    assert len(os.listdir(tmp_path)) == 2


def test_a_pipe_is_written_by_its_name() -> None:
    end, start = os.pipe()
    for name in (f"/dev/fd/{start}", f"/proc/self/fd/{start}"):
        files.write_text(name, "through\n")
        assert os.read(end, 99) == b"through\n"
    os.close(end)
    with pytest.raises(UsageError, match="Broken pipe"):
        files.write_text(f"/dev/fd/{start}", "x")
    os.close(start)


def test_a_named_pipe_is_written_in_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 99) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def test_a_relative_name_where_the_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="No such file"):
        Output.to("x")
    with pytest.raises(FormatError, match="No such file"):
        files.read_text("x")


def test_two_results_at_one_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    a, b = Output.to(tmp_path / "a"), Output.to(tmp_path / "b")
    check_distinct([a, b, Output.to("/dev/null"), Output.to("/dev/null")])
    for pair in ([a, Output.to(tmp_path / "link")], [Output.to("-"), Output.to("/dev/stdout")]):
        with pytest.raises(UsageError, match="same place"):
            check_distinct(pair)


@pytest.mark.parametrize("stream", [None, "closed", "/dev/full", "read only"])
def test_an_output_that_takes_nothing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, stream: str | None
) -> None:
    file = None if stream is None else open("/dev/full" if stream == "/dev/full" else os.devnull, "w")  # noqa: SIM115
    if file is not None and stream == "closed":
        file.close()
    if file is not None and stream == "read only":
        os.dup2(os.open(os.devnull, os.O_RDONLY), file.fileno())
    monkeypatch.setattr(sys, "stdout", file)
    with pytest.raises(UsageError, match="cannot write: .*standard output"):
        streams.write_output("data")
    if stream == "/dev/full":
        assert file is not None
        file.close()  # what was left in its buffer goes to the null device
        return
    with pytest.raises(UsageError, match="standard output"):
        streams.check_output()


def test_a_reader_that_has_gone_has_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    end, start = os.pipe()
    os.close(end)
    file = open(start, "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", file)
    with pytest.raises(streams.ReaderGoneError):
        streams.write_output("data")
    file.close()


@pytest.mark.parametrize("stream", [None, "closed", "/dev/full"])
def test_talk_that_nobody_hears_is_dropped(monkeypatch: pytest.MonkeyPatch, stream: str | None) -> None:
    file = None if stream is None else open("/dev/full" if stream == "/dev/full" else os.devnull, "w")  # noqa: SIM115
    if file is not None and stream == "closed":
        file.close()
    monkeypatch.setattr(sys, "stderr", file)
    streams.say("hello")
    streams.rewrite_line("hello")
    streams.say("again")
    if file is not None:
        file.close()


@pytest.mark.parametrize("stdin", [None, "closed", "folder"])
def test_an_input_that_gives_nothing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stdin: str | None
) -> None:
    file = None if stdin is None else open(os.devnull)  # noqa: SIM115
    if file is not None and stdin == "closed":
        file.close()
    elif file is not None:
        os.dup2(os.open(tmp_path, os.O_RDONLY), file.fileno())
    monkeypatch.setattr(sys, "stdin", file)
    with pytest.raises(FormatError, match="cannot read: .*standard input"):
        files.read_text("-")


@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", "3 µs · ≤"), ("latin-1", "3 us | ?"), ("ascii", "3 us | ?")]
)
def test_what_an_encoding_lacks_is_replaced(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str
) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding))
    streams.write_output("3 µs · ≤")
    assert buffer.getvalue().decode(encoding) == shown


def test_nothing_that_a_terminal_obeys_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    streams.say("note:", ESCAPES)
    error = str(CheckError(ESCAPES, where=ESCAPES, needed=ESCAPES, given=ESCAPES, fix=ESCAPES))
    for text in (capsys.readouterr().err, error, printable(ESCAPES)):
        assert all(line.isprintable() for line in text.splitlines())
        assert "\\x1b[2J\\x07\\x9b31m\\u202e\\x7f" in text
    assert printable("two\nlines, é ≤ 漢") == "two\nlines, é ≤ 漢"
