"""Kernels for CUDA devices, written in Triton: imported only where a tensor is on one and Triton is there.

`QUANTKIT_TRITON=0` switches them off; then, and without Triton, torch does the work. Each file has its device functions
first and the Python functions that launch them last. What they compute is written in `kernels.reference` and
`numerics`; tests hold them to it through Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch


@functools.lru_cache(maxsize=1)
def is_installed() -> bool:
    """Whether Triton can be imported."""
    try:
        import triton.language  # noqa: F401
    except Exception:  # a broken installation must not break what runs without it
        return False
    return True


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """What Triton raises where a kernel cannot be compiled for a chip or does not fit it; none is a RuntimeError."""
    if not is_installed():
        return ()
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return CompilationError, OutOfResources, PTXASError


def is_used(device: torch.device) -> bool:
    """Whether tensors on this device are for these kernels."""
    return device.type == "cuda" and os.environ.get("QUANTKIT_TRITON", "1") != "0" and is_installed()


def module(name: str, device: torch.device) -> Any:
    """The module of this package with that name, if tensors on the device are for its kernels; else None."""
    return importlib.import_module(f"{__name__}.{name}") if is_used(device) else None


@functools.lru_cache(maxsize=8)
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a device; 4 for the interpreter, which runs on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.lru_cache(maxsize=8)
def capability(device: torch.device) -> int:
    """Compute capability of a device, 90 for Hopper; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << max(0, count - 1).bit_length()
