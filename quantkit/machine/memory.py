"""Memory of this process, and return of freed memory to the system when the C library would keep it.

glibc keeps freed blocks of up to 32 MiB. Between two phases with different needs, these blocks would raise the peak.
"""

import contextlib
import ctypes
import gc
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

# Packages that transformers and compressed-tensors import if they are installed: for losses of object detectors, and
# for kernels. Together, both packages take 100 MB.
_OPTIONAL = ("scipy", "triton")
# Compiled matrix products that oneDNN caches: each takes half a megabyte, and GPTQ has products of hundreds of shapes.
_PRODUCTS = "16"


def release_freed_memory() -> None:
    """Return freed memory to the system, if possible."""
    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def peak_bytes() -> int:
    """Return the highest resident memory of this process so far, as the kernel counts it.

    It reads /proc if possible, because getrusage includes the program that started this one.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return proc_bytes("self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None if the system does not report it."""
    return proc_bytes("self/status", "VmRSS")


def proc_bytes(file: str, key: str) -> int | None:
    """Return the entry `key:   12 kB` of a file in /proc, in bytes; None if there is no such entry."""
    with contextlib.suppress(OSError):
        entry = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc", file).read_text(), re.MULTILINE)
        return int(entry[1]) * 1024 if entry else None
    return None


@contextlib.contextmanager
def importing(library: str) -> Iterator[None]:
    """Turn off garbage collection while the block imports a large library; later collections skip its objects.

    Such an import creates a million permanent objects, and a collection that searches them takes over a second of CPU
    time. Only programs should call this, not libraries.

    Args:
        library: name of the library; if it is already imported, nothing changes.
    """
    if library in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def spare_memory() -> None:
    """Reduce memory before compressing on a CPU: import transformers and compressed-tensors without unneeded parts.

    It also makes oneDNN cache fewer compiled products. Only programs should call this, not libraries, because the
    changes are permanent.
    """
    import torch

    # Once transformers is imported, it remembers which packages it found.
    if torch.cuda.is_available() or "transformers" in sys.modules:
        return
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _PRODUCTS)
    hidden = [name for name in _OPTIONAL if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # None hides them: Python then cannot import them
    try:
        with importing("transformers"), contextlib.suppress(ImportError):  # reported where they are needed
            import compressed_tensors  # noqa: F401
            import transformers.modeling_utils

            getattr(transformers.utils.is_scipy_available, "cache_clear", int)()  # models may look for scipy later
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
