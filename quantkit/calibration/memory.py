"""Giving freed memory back to the system, where the C library would keep it for later.

glibc holds on to freed blocks of up to 32 MiB; between two phases with different needs that adds up to the peak.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["release_freed_memory"]


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None with another C library."""
    try:
        function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return function


def release_freed_memory() -> None:
    """Return freed memory to the system; does nothing where that is not possible."""
    trim = _trim()
    if trim is not None:
        trim(0)
