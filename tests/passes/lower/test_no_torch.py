"""The passes that lower an order are used by the planning commands: they must not load torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["codegen", "fold", "insert_comm", "merge_backward"])
def test_lowering_does_not_import_torch(name: str) -> None:
    code = f"import sys, zbcompile.passes.lower.{name}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
