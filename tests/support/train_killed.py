"""Runs examples/train.py, and kills rank 1 when a step begins: ``train_killed.py STEP arguments...``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import zbcompile
from tests.support.places import EXAMPLES

sys.path.insert(0, str(EXAMPLES))
import train  # noqa: E402

step = zbcompile.Pipeline.step


def killing(self: zbcompile.Pipeline, *args: Any, **kwargs: Any) -> Any:
    if self.rank in (1, None) and self.step_number == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)


zbcompile.Pipeline.step = killing  # type: ignore[method-assign]
train.train(train.arguments(sys.argv[2:]))
