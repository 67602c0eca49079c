"""C files, compiled for this machine's instructions at first use and loaded through ctypes; all of it is optional.

    _LIBRARY = Library(Path(__file__).parent)                     # all *.c of the folder become one library
    if _LIBRARY.get():
        multiply = _LIBRARY.function("qk_multiply", ctypes.c_void_p, ctypes.c_int64)
        multiply(tensor.data_ptr(), len(tensor))

The call releases the GIL. Threads: `#pragma omp parallel num_threads(threads) if(threads > 1)`; OpenMP is torch's own
copy, so all share one pool. Without a compiler, AVX2 or permission there is no library: `status` says why, and so does
one warning per process. In the environment `QUANTKIT_NATIVE=0` switches all of them off, `QUANTKIT_NATIVE=avx512`
leaves AMX out and `QUANTKIT_NATIVE=avx2` AVX-512 as well, for comparison and for tests.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from quantkit.native.build import BuildError, build_library, load_library

Function = Callable[..., Any]
_LOG = logging.getLogger(__name__)


class Library:
    """A library compiled from a folder of C files.

    Args:
        sources: the folder; one of its files exports `int qk_has_avx512(void)`, whether it uses AVX-512, and where
            there is code for AMX, one exports `int qk_has_amx(void)`.
    """

    def __init__(self, sources: Path) -> None:
        self._sources = sources

    def get(self) -> ctypes.CDLL | None:
        """The library, compiled on the first call (a second or two, once per machine and version); None without one."""
        return None if _is_off() else self._loaded[0]

    def status(self) -> str:
        """One line for `--stats`: what was compiled, or why torch is used instead."""
        return "off: QUANTKIT_NATIVE=0" if _is_off() else self._loaded[1]

    def function(self, name: str, *arguments: Any, returns: Any = None) -> Function:
        """A function of the library, which is there, its signature declared.

        Args:
            name: as exported in C.
            arguments: ctypes types; pointers are `ctypes.c_void_p` and take `tensor.data_ptr()`.
            returns: ctypes type of the result.
        """
        loaded = self.get()
        assert loaded is not None, "asked for without a library"
        symbol = loaded[name]
        symbol.argtypes, symbol.restype = list(arguments), returns
        return symbol

    def has_avx512(self) -> bool:
        """Whether there is a library and it uses AVX-512: then numbers in bf16 are multiplied as they are."""
        loaded = self.get()
        return loaded is not None and bool(loaded.qk_has_avx512())

    @cached_property  # threads that ask at once may both compile, which does no harm: see `build`
    def _loaded(self) -> tuple[ctypes.CDLL | None, str]:
        try:
            path, text = build_library(self._sources, widest=os.environ.get("QUANTKIT_NATIVE"))
            loaded = load_library(path)
            return loaded, f"{text}; uses {_instructions(loaded)}"
        except (BuildError, OSError) as error:
            _warn_once(str(error))
            return None, f"off: {error}"


def _instructions(loaded: ctypes.CDLL) -> str:
    """Asked of what was made: a compiler may know less than the CPU has, and the system may keep AMX to itself."""
    amx = ", AMX" if hasattr(loaded, "qk_has_amx") and loaded.qk_has_amx() else ""
    return f"AVX-512 with BF16 and VNNI{amx}" if loaded.qk_has_avx512() else "AVX2"


def _is_off() -> bool:
    return os.environ.get("QUANTKIT_NATIVE") == "0"


@cache  # both libraries have the same reason
def _warn_once(reason: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":  # of several ranks on a machine the first speaks
        return
    _LOG.warning(
        "quantkit's C kernels are off: %s. torch computes in their place, slower and with other rounding, "
        "so greedy text may differ; QUANTKIT_NATIVE=0 hides this line",
        reason,
    )
