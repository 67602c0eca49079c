"""C files, compiled once per instruction set and loaded through ctypes; entirely optional.

    _LIBRARY = Library(Path(__file__).parent)                     # all *.c of the folder become one library
    if _LIBRARY.get():
        multiply = _LIBRARY.function("qk_multiply", "pn")
        multiply(tensor.data_ptr(), len(tensor))

The call releases the GIL. Threads: `#pragma omp parallel num_threads(threads) if(threads > 1)`; all code shares the
thread pool of torch's OpenMP. `build` says where libraries come from. Without AVX2, without NEON's dot products, or
without a compiled library, torch computes; `status` and one warning per process say why. For tests and comparisons,
`QUANTKIT_NATIVE=0` disables all C code, `QUANTKIT_NATIVE=avx512` disables AMX, and `QUANTKIT_NATIVE=avx2` disables AMX
and AVX-512.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from quantkit.native.build import BuildError, compiler_of, find_library, load_library

Function = Callable[..., Any]
_LOG = logging.getLogger(__name__)
_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "": None,
}


class Library:
    """The library of a folder of C files.

    Args:
        sources: the folder. Its files export `int qk_has_avx512(void)` and `int qk_has_amx(void)`: whether the library
            uses AVX-512 and AMX.
    """

    def __init__(self, sources: Path) -> None:
        self._sources = sources
        self._functions: dict[tuple[str, str, str], Function] = {}

    def get(self) -> ctypes.CDLL | None:
        """Return the library; None if unavailable. In a checkout, the first call compiles it (some seconds)."""
        return None if _is_off() else self._loaded[0]

    def status(self) -> str:
        """Return one line for `--stats`: how the library was compiled, or why torch is used instead."""
        return "off: QUANTKIT_NATIVE=0" if _is_off() else self._loaded[1]

    def function(self, name: str, arguments: str, returns: str = "") -> Function:
        """Return a function of the loaded library with its signature declared.

        Args:
            name: name exported in C.
            arguments: a letter for the type of each argument: p = pointer (takes `tensor.data_ptr()`), n = int64_t,
                i = int, f = float, d = double.
            returns: letter for the type of the result; empty = void.
        """
        key = name, arguments, returns
        if key not in self._functions:
            loaded = self.get()
            assert loaded is not None, "asked for without a library"
            symbol = loaded[name]
            symbol.argtypes, symbol.restype = [_TYPES[letter] for letter in arguments], _TYPES[returns]
            self._functions[key] = symbol
        return self._functions[key]

    def has_avx512(self) -> bool:
        """Whether the library exists and uses AVX-512, and so multiplies bf16 without conversion."""
        loaded = self.get()
        return loaded is not None and bool(loaded.qk_has_avx512())

    @cached_property  # threads that ask at once may both compile, which does no harm: see `build`
    def _loaded(self) -> tuple[ctypes.CDLL | None, str]:
        try:
            path = find_library(self._sources, widest=os.environ.get("QUANTKIT_NATIVE"))
            loaded = load_library(path)
            return loaded, f"compiled by {compiler_of(path)}; uses {_instructions(loaded, path.name)}"
        except (BuildError, OSError) as error:
            _warn_once(str(error))
            return None, f"off: {error}"


def _instructions(loaded: ctypes.CDLL, name: str) -> str:
    """Return the instructions used by a loaded library with this file name, which may be fewer than the CPU has."""
    if name.startswith("neon-"):
        return "NEON with dot products"
    amx = ", AMX" if loaded.qk_has_amx() else ""
    return f"AVX-512 with BF16 and VNNI{amx}" if loaded.qk_has_avx512() else "AVX2"


def _is_off() -> bool:
    return os.environ.get("QUANTKIT_NATIVE") == "0"


@cache  # both libraries have the same reason
def _warn_once(reason: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":  # of several ranks on a machine, only the first one warns
        return
    _LOG.warning(
        "quantkit's C kernels are off: %s. torch computes instead: int4 models run 2 to 5 times slower, and "
        "rounding differs, so greedy text may differ too; QUANTKIT_NATIVE=0 hides this line",
        reason,
    )
