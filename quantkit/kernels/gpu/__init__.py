"""Triton kernels for CUDA devices; `module` imports them if a tensor is on such a device and Triton is installed.

`QUANTKIT_TRITON=0` disables the kernels. Torch does the work if they are disabled or Triton is missing. Torch also
replaces a family of kernels that gives wrong results or does not compile on a device. Each file has its device
functions first, then the Python functions that launch them. `kernels.reference` and `numerics` define the results;
tests run the kernels in Triton's interpreter and compare them with these definitions.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from quantkit.errors import first_line

FAMILIES = {
    "attention": "attention over pages",
    "experts": "mixtures of experts",
    "ops": "norms and gates",
    "quantized_linear": "products with quantized weights",
}
"""What each family of kernels computes, keyed by the name of its module. Torch replaces a family as a whole."""

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_replaced: dict[tuple[str, int | None], str] = {}  # reason why torch replaces a family; keys: family, device number
_measuring = 0  # while more than 0, no family is replaced


@functools.lru_cache(maxsize=1)
def is_installed() -> bool:
    """Whether Triton can be imported."""
    try:
        import triton.language  # noqa: F401
    except Exception:  # a broken installation of Triton must not break code that runs without it
        return False
    return True


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions that Triton raises for a kernel that does not compile for a chip or does not fit it."""
    if not is_installed():
        return ()
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return CompilationError, OutOfResources, PTXASError


def is_used(device: torch.device) -> bool:
    """Whether the kernels handle tensors on this device."""
    return device.type == "cuda" and os.environ.get("QUANTKIT_TRITON", "1") != "0" and is_installed()


def module(name: str, device: torch.device) -> Any:
    """Return this package's module of that name if the kernels handle tensors on the device; otherwise None."""
    if not is_used(device) or why_replaced(name, device) is not None:
        return None
    return importlib.import_module(f"{__name__}.{name}")


def why_replaced(family: str, device: torch.device) -> str | None:
    """Return why torch replaces a kernel family on a device; None if it does not."""
    # This runs before every launch. If the table is empty, as it usually is, the device is not looked up.
    return _replaced.get((family, _number(device))) if _replaced else None


def replace(family: str, device: torch.device, reason: str) -> None:
    """Let torch replace a kernel family on a device from now on, and warn."""
    _replaced[family, _number(device)] = reason
    _LOG.warning("GPU kernels for %s: %s; torch replaces them on %s and is slower", FAMILIES[family], reason, device)


@contextmanager
def measuring() -> Iterator[None]:
    """In this context, raise Triton's errors instead of falling back to torch. Otherwise, a check or measurement of a
    kernel would silently run torch.
    """
    global _measuring
    _measuring += 1
    try:
        yield
    finally:
        _measuring -= 1


def attempt(family: str, device: torch.device, launch: Callable[..., T], *arguments: Any) -> T | None:
    """Return the result of `launch`; None if Triton refuses the kernel, after which torch replaces the whole family."""
    if why_replaced(family, device) is not None:
        return None
    try:
        return launch(*arguments)
    except refusals() as error:
        if _measuring:
            raise
        replace(family, device, f"{type(error).__name__}: {first_line(error)}")
        return None


def _number(device: torch.device) -> int | None:
    return torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index


@functools.lru_cache(maxsize=8)
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 4 for the interpreter, which runs on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.lru_cache(maxsize=8)
def capability(device: torch.device) -> int:
    """Return the compute capability of a device times ten, e.g. 90 for Hopper; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()
