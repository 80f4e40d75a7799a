"""Bytes really in use, from the C allocator: what no prediction can argue with."""

from __future__ import annotations

import ctypes

__all__ = ["bytes_in_use"]


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2: ten counters."""

    _fields_ = [(f"counter_{i}", ctypes.c_size_t) for i in range(10)]
    in_mapped = property(lambda self: self.counter_4)
    in_arenas = property(lambda self: self.counter_7)


def bytes_in_use() -> int:
    """Bytes that the C allocator has handed out and not got back (glibc 2.33 or later)."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo
    info = library.mallinfo2()
    return int(info.in_arenas + info.in_mapped)
