"""What is shipped: a wheel with everything in it, the licence, layers that hold, a lean start."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the sources, as from a clone."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    shutil.copytree(
        ROOT / "zbcompile", source / "zbcompile", symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "passes", source / "passes", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_holds_every_module_and_mark(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    wanted = [
        path.relative_to(ROOT)
        for folder in ("zbcompile", "passes")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".typed") and "__pycache__" not in path.parts
    ]
    for path in wanted:
        inside = Path("zbcompile") / path if path.parts[0] == "passes" else path
        assert inside.as_posix() in names
    assert "zbcompile/passes/capture/capture.py" in names
    assert "zbcompile/py.typed" in names
    assert not any(name.startswith(("passes/", "tests/", "benchmarks/")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_names_its_command_and_licence(wheel: zipfile.ZipFile) -> None:
    info = {Path(name).name: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "zbcompile = zbcompile.__main__:main" in wheel.read(info["entry_points.txt"]).decode()
    metadata = wheel.read(info["METADATA"]).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"Version: {PROJECT['project']['version']}" in metadata


def test_a_wheel_runs_without_its_sources(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    script = "import sys, zbcompile.passes, zbcompile.cli.main as c; sys.exit(c.main(['schema', 'profile']))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert '"urn:zbcompile:profile:' in done.stdout


def test_the_version_is_said_once_everywhere() -> None:
    import zbcompile

    assert zbcompile.__version__ == PROJECT["project"]["version"]
    assert f"## {zbcompile.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_pinned_without_hosts_or_local_versions() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line) for line in lines)
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [
        *PROJECT["project"]["dependencies"],
        *extras["test"],
        *extras["lint"],
        *extras["models"],
        "build",
        "setuptools",
        "wheel",
    ]
    for requirement in wanted:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)[0]
        assert re.sub(r"[-_.]+", "-", name).lower() in pinned, requirement


def test_every_package_folder_is_listed() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    found = {
        ".".join((*above, *path.parent.relative_to(folder).parts))
        for folder, above in (
            (ROOT / "zbcompile", ("zbcompile",)),
            (ROOT / "passes", ("zbcompile", "passes")),
        )
        for path in folder.rglob("__init__.py")
        if folder.name == "passes" or "passes" not in path.parts
    }
    assert found == listed


def test_passes_is_a_link_that_git_keeps() -> None:
    link = ROOT / "zbcompile" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_nobody_imports_passes_by_its_bare_name() -> None:
    for path in [*ROOT.glob("zbcompile/**/*.py"), *ROOT.glob("passes/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        assert not re.search(r"^\s*(from|import) passes\b", path.read_text(), re.MULTILINE), path
