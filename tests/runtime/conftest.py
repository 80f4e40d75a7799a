"""Options of the kill points."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def kill_points() -> range:
    """Seeds of the kill points: ``KILL_POINTS`` of them (10), from ``KILL_SEED`` on (0)."""
    first, count = int(os.environ.get("KILL_SEED", "0")), int(os.environ.get("KILL_POINTS", "10"))
    return range(first, first + count)
