"""Triton's interpreter, which runs kernels on the CPU: whether this process has it.

It is chosen when Triton is imported, by the variable that `tests/conftest.py` sets where no GPU is.
"""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import version

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.language") is None,
    reason="needs triton: pip install triton",
)


def is_too_old() -> bool:
    """Whether this Triton's interpreter fails with this NumPy: it makes a number of an array of one."""
    triton, numpy = (tuple(int(part) for part in version(name).split(".")[:2]) for name in ("triton", "numpy"))
    return triton < (3, 9) and numpy >= (2, 4)


def why_not() -> str | None:
    """Why kernels are not interpreted in this process, if they are not."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.language") is None:
        return "needs triton: pip install triton"
    if is_too_old():
        return "Triton before 3.9 with NumPy from 2.4 on cannot interpret loops"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "kernels are compiled here: TRITON_INTERPRET is not 1"
    return None
