"""Kernels in C for this machine's instructions: compiled at first use, loaded through ctypes, optional.

Every `*.c` file of this folder is compiled into one library. To add a kernel: put `name.c` here, include
`quantkit.h`, mark its entry `QK_EXPORT`, and call it through

    multiply = cpu.function("qk_multiply", ctypes.c_void_p, ctypes.c_int64)      # if cpu.library() is there
    multiply(tensor.data_ptr(), len(tensor))

The call releases the GIL. Threads: `#pragma omp parallel num_threads(threads) if(threads > 1)`; OpenMP is torch's own
copy, so both share one pool. They are written for AVX-512 with BF16 and VNNI, and by `avx2.h` run with AVX2 too.
Without a compiler, AVX2 or permission everything falls back to torch, and `status` says why; in the environment
`QUANTKIT_NATIVE=0` switches them off and `QUANTKIT_NATIVE=avx2` leaves AVX-512 out, for comparison and for tests.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

from quantkit.kernels.cpu.build import BuildError, build_library, load_library

Function = Callable[..., Any]


def library() -> ctypes.CDLL | None:
    """The library, compiled on the first call (a second or two, once per machine and version); None without one."""
    return None if _is_off() else _load()[0]


def status() -> str:
    """One line for `--stats`: what was compiled, or why torch is used instead."""
    return "off: QUANTKIT_NATIVE=0" if _is_off() else _load()[1]


def function(name: str, *arguments: Any, returns: Any = None) -> Function:
    """A function of the library, which is there, its signature declared.

    Args:
        name: as exported in C.
        arguments: ctypes types; pointers are `ctypes.c_void_p` and take `tensor.data_ptr()`.
        returns: ctypes type of the result.
    """
    loaded = library()
    assert loaded is not None, "asked for without a library"
    symbol = loaded[name]
    symbol.argtypes, symbol.restype = list(arguments), returns
    return symbol


@functools.cache
def has_avx512() -> bool:
    """Whether the library, which is there, uses AVX-512: then inputs and weights in bf16 are multiplied as they are."""
    return bool(function("qk_has_avx512", returns=ctypes.c_int)())


def _is_off() -> bool:
    return os.environ.get("QUANTKIT_NATIVE") == "0"


@functools.cache  # threads that ask at once may both compile, which does no harm: see `build`
def _load() -> tuple[ctypes.CDLL | None, str]:
    try:
        path, text = build_library(avx512=os.environ.get("QUANTKIT_NATIVE") != "avx2")
        loaded = load_library(path)
        # Asked of what was made: an older compiler may know less than the CPU has.
        instructions = "AVX-512 with BF16 and VNNI" if loaded.qk_has_avx512() else "AVX2"
        return loaded, f"{text}; uses {instructions}"
    except (BuildError, OSError) as error:
        return None, f"off: {error}"
