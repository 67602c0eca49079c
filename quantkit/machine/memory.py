"""Return freed memory to the system, and import libraries so that they take less memory.

glibc keeps freed blocks of up to 32 MiB. If the next phase of a run cannot use them, they raise the peak memory.
"""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator

# Packages that transformers and compressed-tensors import if they are installed: for losses of object detectors, and
# for kernels. Together, both packages take 100 MB.
_OPTIONAL = ("scipy", "triton")
# Maximum number of compiled matrix products that oneDNN caches. Each takes half a megabyte, and GPTQ needs hundreds.
_PRODUCTS = "16"


def release_freed_memory() -> None:
    """Make the C library return freed memory to the system, if possible."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def free_models() -> None:
    """Free unused models that reference cycles keep in memory, and return their memory to the system."""
    gc.collect()
    release_freed_memory()


@contextlib.contextmanager
def importing(library: str) -> Iterator[None]:
    """Turn off garbage collection while the block imports a large library, and let later collections skip its objects.

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
    """Reduce the memory of a compression on a CPU.

    Import transformers and compressed-tensors without the optional packages that compression does not need, and make
    oneDNN cache fewer compiled matrix products. Only programs should call this, not libraries, because the changes are
    permanent.
    """
    import torch

    # If transformers is imported already, hiding packages has no effect: it remembers which packages it found.
    if torch.cuda.is_available() or "transformers" in sys.modules:
        return
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _PRODUCTS)
    hidden = [name for name in _OPTIONAL if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # None hides them: Python then cannot import them
    try:
        with importing("transformers"), contextlib.suppress(ImportError):  # reported where it is needed
            import compressed_tensors  # noqa: F401
            import transformers.modeling_utils

            getattr(transformers.utils.is_scipy_available, "cache_clear", int)()  # models may look for scipy later
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
