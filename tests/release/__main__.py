"""Build wheel and source archive, install the wheel on several Pythons, and use it in an empty folder.

    python -m tests.release [INTERPRETER ...]

Without interpreters those of Python 3.11, 3.12 and 3.13 that are found are taken. Exit code 1 where something
fails, or where there is no interpreter at all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.support.places import ROOT

VERSIONS = ("3.11", "3.12", "3.13")
SOURCES = ("zbcompile", "passes", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
USE = """
import sys
import torch, zbcompile
from torch import nn
assert "site-packages" in zbcompile.__file__, zbcompile.__file__
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
x, y = torch.randn(4, 8), torch.randn(4, 8)
pipeline = zbcompile.compile(model, 2, example_args=(x,), example_target=y, loss_fn=nn.functional.mse_loss,
                             num_microbatches=2, time_limit=1.0)
pipeline.step(x, target=y)
got = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
for rows, targets in zip(x.chunk(2), y.chunk(2)):
    nn.functional.mse_loss(model(rows), targets).backward()
assert all(torch.equal(a, p.grad / 2) for a, p in zip(got, model.parameters()))
python = sys.version.split()[0]
print(f"zbcompile {zbcompile.__version__}, Python {python}, torch {torch.__version__}: gradients equal")
"""


def run(*line: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command and return what it prints; end with its messages where it fails."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        line, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, line))}\n{done.stdout}{done.stderr}")
    return done.stdout


def copied(folder: Path) -> Path:
    """Return a copy of what a release is built from, without what was built before."""
    source = folder / "source"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    return source


def built(folder: Path) -> Path:
    """Build both files, and the wheel again out of the archive; return the wheel."""
    source = copied(folder)
    build = (sys.executable, "-m", "build", "--no-isolation")
    run(*build, "--outdir", folder / "dist", source, cwd=folder)
    (archive,), (wheel,) = (list((folder / "dist").glob(f"*.{end}")) for end in ("tar.gz", "whl"))
    with tarfile.open(archive) as file:
        file.extractall(folder / "again", filter="data")
    (unpacked,) = (folder / "again").iterdir()
    run(*build, "--wheel", "--outdir", folder / "second", unpacked, cwd=folder)
    (second,) = (folder / "second").glob("*.whl")
    if names(wheel) != names(second):
        raise SystemExit(f"the archive lacks or adds: {sorted(names(wheel) ^ names(second))[:10]}")
    print(f"built {archive.name} and {wheel.name}, {len(names(wheel))} files")
    (ROOT / "dist").mkdir(exist_ok=True)
    for file in (archive, wheel):
        shutil.copy(file, ROOT / "dist" / file.name)
    return wheel


def names(wheel: Path) -> set[str]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def found() -> list[str]:
    """Return the interpreters of this machine, and say for which versions there is none."""
    interpreters = []
    for version in VERSIONS:
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        places = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}*/bin/python3"))]
        works = [place for place in places if place and says_version(str(place)) == version]
        if works:
            interpreters.append(str(works[-1]))
        else:
            print(f"Python {version}: no interpreter found, not tried")
    return interpreters


def says_version(interpreter: str) -> str:
    """Return the version of an interpreter, empty where it does not run."""
    line = (interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def used(interpreter: str, wheel: Path, folder: Path) -> None:
    """Install the wheel in a new environment and use it in an empty folder."""
    place, work = folder / "environment", folder / "work"
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    run(interpreter, "-m", "venv", place, cwd=work)
    run(place / "bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=work)
    command = place / "bin/zbcompile"
    shutil.copy(ROOT / "examples/profiles/four-unequal-stages.json", work / "costs.json")
    run(command, "plan", "costs.json", "-o", "plan.json", cwd=work)
    run(command, "show", "plan.json", cwd=work)
    run(command, "check", "plan.json", "--certificate", cwd=work)
    asked = ("selftest", "--device", "cpu", "--only", "held", "--time-limit", "1500")
    run(command, *asked, cwd=work, OMP_NUM_THREADS="1")
    print(run(place / "bin/python", "-c", USE, cwd=work, OMP_NUM_THREADS="1").strip(), flush=True)


def main() -> int:
    """Check the release on each interpreter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("interpreters", nargs="*", help="default: those that are found")
    interpreters = parser.parse_args().interpreters or found()
    with tempfile.TemporaryDirectory() as name:
        wheel = built(Path(name))
        for interpreter in interpreters:
            used(interpreter, wheel, Path(name))
    return 0 if interpreters else 1


if __name__ == "__main__":
    sys.exit(main())
