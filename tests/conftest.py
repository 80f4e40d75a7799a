"""Shared fixtures: golden files and the committed data."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import settings

from tests.support.places import DATA, GOLDEN, ROOT

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # copies of a process with more threads would hang
LOCK = "ZBCOMPILE_TESTS_LOCK"
_COMPILING = pytest.StashKey["subprocess.Popen[bytes]"]()
WAITING = (
    "tests/runtime/",
    "tests/pipeline/test_failures_processes.py",
    "tests/pipeline/test_checkpoints.py",
    "tests/examples/",
    "tests/test_ecosystem.py",
    "tests/cli/test_demo.py",
)
settings.register_profile("zbcompile", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("zbcompile")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


def pytest_configure(config: pytest.Config) -> None:
    """Where several processes will test, have the planner's kernels compiled, once for all, as they collect.

    A shell starts what runs in its background with Ctrl-C ignored: the tests of interrupts need it back.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        command = [sys.executable, "-c", "from tests.support.planner_cases import compile_kernels as c; c()"]
        lock, os.environ[LOCK] = tempfile.mkstemp(prefix="zbcompile-tests-")
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the process that it is passed to ends
        config.stash[_COMPILING] = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.DEVNULL, pass_fds=[lock]
        )
        os.close(lock)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Wait until the kernels are compiled: all that plan would else compile them at the same time."""
    if hasattr(session.config, "workerinput") and LOCK in os.environ:
        with open(os.environ[LOCK]) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what `pytest_configure` began."""
    compiling = config.stash.get(_COMPILING, None)
    if compiling is not None:
        compiling.kill()
        compiling.wait()
        os.unlink(os.environ[LOCK])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that mostly wait for processes of their own: others run beside them meanwhile."""
    items.sort(key=lambda item: not item.nodeid.startswith(WAITING))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give tests that share what their module makes to one process; all others one by one."""
    from xdist.scheduler import LoadScopeScheduling

    class BySharedThings(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if _shares(file) else nodeid

    if config.getoption("dist") != "load":
        return None
    config.option.loadscopereorder = False
    return BySharedThings(config, log)


@cache
def _shares(file: str) -> bool:
    text = (ROOT / file).read_text()
    return 'scope="module"' in text or "@functools.cache" in text


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """Fork ranks from a server that has loaded and compiled what they will; the first ones start it."""
    names = multiprocessing.forkserver.set_forkserver_preload

    def also_warm(modules: list[str]) -> None:
        names([*modules, "tests.support.warm"])
        with contextlib.chdir(ROOT):
            multiprocessing.forkserver.ensure_running()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.forkserver, "set_forkserver_preload", also_warm)
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: text must equal tests/golden/name, or rewrites it under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden file {name}: run pytest --update-golden and read the diff"
        assert text == path.read_text()

    return compare


@pytest.fixture(scope="session")
def paper_profiles() -> dict[str, Any]:
    """Profiles and bubble rates published in arXiv 2401.10241."""
    return json.loads((DATA / "paper_profiles.json").read_text())


@pytest.fixture(scope="session")
def peer_schedules() -> dict[str, Any]:
    """Spans and makespans of the peer's orders."""
    return json.loads((DATA / "peer_schedules.json").read_text())
