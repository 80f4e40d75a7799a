"""Opens a page in a headless browser, and reads its screenshot."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

__all__ = ["BROWSER", "WHY_NOT", "opened", "pixels"]

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WHY_NOT = "no chromium is installed (apt-get install chromium)"
_WIDTH, _HEIGHT = 700, 500


def opened(page: Path, fragment: str = "") -> tuple[str, Path]:
    """Return the document as HTML after its scripts have run, and a PNG of it."""
    assert BROWSER is not None
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
    words += ["--virtual-time-budget=3000"]  # frames run until then
    words += [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={_WIDTH},{_HEIGHT}"]
    target = page.with_suffix(".png")
    words += ["--dump-dom", f"--screenshot={target}", f"{page.as_uri()}{fragment}"]
    run = subprocess.run([BROWSER, *words], capture_output=True, text=True, timeout=90, check=True)
    return run.stdout, target


def pixels(png: Path) -> dict[tuple[int, int, int], int]:
    """Return how often a PNG of 8 bits per channel, not interlaced, has each colour."""
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, form, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    assert (depth, interlaced) == (8, 0)
    size = {2: 3, 6: 4}[form]
    packed, at = b"", 8
    while at < len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + length] if name == b"IDAT" else b""
        at += 12 + length
    raw, before = zlib.decompress(packed), bytearray(width * size)
    found: dict[tuple[int, int, int], int] = {}
    for y in range(height):
        start = y * (width * size + 1)
        row = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + width * size]), before, size)
        for x in range(0, len(row), size * 3):  # every third pixel is enough
            colour = (row[x], row[x + 1], row[x + 2])
            found[colour] = found.get(colour, 0) + 1
        before = row
    return found


def _unfiltered(kind: int, row: bytearray, above: bytearray, size: int) -> bytearray:
    """Undo a PNG filter: none, sub, up, average, Paeth (RFC 2083, section 6)."""
    for k in range(len(row)) if kind else ():
        left, up = row[k - size] if k >= size else 0, above[k]
        corner = above[k - size] if k >= size else 0
        estimate = left + up - corner
        nearest = min((left, up, corner), key=lambda value: abs(estimate - value))
        row[k] = (row[k] + (0, left, up, (left + up) // 2, nearest)[kind]) & 255
    return row
