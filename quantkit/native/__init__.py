"""C files, compiled once per instruction set and loaded through ctypes, and the waiting threads of OpenMP.

    _LIBRARY = Library(Path(__file__).parent)                     # all *.c of the folder become one library
    if _LIBRARY.get():
        multiply = _LIBRARY.function("qk_multiply", "pn")
        multiply(tensor.data_ptr(), len(tensor))

All C code is optional. A call releases the GIL. C files start threads with `#pragma omp parallel num_threads(threads)
if(threads > 1)`; all of them use the thread pool of torch's OpenMP. `build` says where libraries come from. Without
AVX2, without NEON's dot products, or without a compiled library, torch computes; `status` and one warning per process
say why. For tests and comparisons, `QUANTKIT_NATIVE=0` disables all C code, `QUANTKIT_NATIVE=avx512` disables AMX, and
`QUANTKIT_NATIVE=avx2` disables AMX and AVX-512.
"""

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from quantkit.machine.system import core_numbers
from quantkit.native.build import BuildError, compiler_of, find_library, find_openmp, load_library

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
_INTERVAL_S = 0.2
# How many cores other processes use beyond those that this process leaves free. Above _CROWDED, OpenMP's waiting
# threads begin to sleep; below _QUIET, they spin again.
_CROWDED, _QUIET = 0.25, 0.15
_CHOSEN_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


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
        """Return one line for `--stats` that says how the library was compiled, or why torch is used instead."""
        return "off: QUANTKIT_NATIVE=0" if _is_off() else self._loaded[1]

    def function(self, name: str, arguments: str, returns: str = "") -> Function:
        """Return a function of the loaded library with its signature declared.

        Args:
            name: name under which the library exports the function.
            arguments: a letter for the type of each argument: p = pointer (takes `tensor.data_ptr()`), n = int64_t,
                i = int, f = float, d = double.
            returns: letter for the type of the result; empty = void.
        """
        key = name, arguments, returns
        if key not in self._functions:
            loaded = self.get()
            assert loaded is not None, "no library is loaded; check `get` first"
            symbol = loaded[name]
            symbol.argtypes, symbol.restype = [_TYPES[letter] for letter in arguments], _TYPES[returns]
            self._functions[key] = symbol
        return self._functions[key]

    def has_avx512(self) -> bool:
        """Whether the library exists and uses AVX-512, whose instructions multiply bf16 without conversion."""
        loaded = self.get()
        return loaded is not None and bool(loaded.qk_has_avx512())

    @cached_property  # two threads may compile at the same time, which does no harm: see `build`
    def _loaded(self) -> tuple[ctypes.CDLL | None, str]:
        try:
            path = find_library(self._sources, widest=os.environ.get("QUANTKIT_NATIVE"))
            loaded = load_library(path)
            return loaded, f"compiled by {compiler_of(path)}; uses {_instructions(loaded, path.name)}"
        except (BuildError, OSError) as error:
            _warn_once(str(error))
            return None, f"off: {error}"


def _instructions(loaded: ctypes.CDLL, name: str) -> str:
    """Return the names of the instruction sets that a loaded library uses; the CPU may have more.

    Args:
        loaded: the library.
        name: name of its file.
    """
    if name.startswith("neon-"):
        return "NEON with dot products"
    amx = ", AMX" if loaded.qk_has_amx() else ""
    return f"AVX-512 with BF16 and VNNI{amx}" if loaded.qk_has_avx512() else "AVX2"


def _is_off() -> bool:
    return os.environ.get("QUANTKIT_NATIVE") == "0"


@cache  # so that libraries with the same problem warn once
def _warn_once(reason: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":  # of several ranks on a machine, only the first one warns
        return
    _LOG.warning(
        "quantkit's C kernels are off: %s. torch computes instead: int4 models run 2 to 5 times slower, and "
        "rounding differs, so greedy text may differ too; QUANTKIT_NATIVE=0 hides this line",
        reason,
    )


class Watcher:
    """Let OpenMP's waiting threads sleep while other processes need the cores.

    A waiting thread of GNU OpenMP spins for milliseconds before it sleeps. On a quiet machine, spinning saves time. On
    a busy machine, waiting threads spin while the thread that they wait for has lost its core, and a run takes several
    times as long.

    OpenMP reads the environment variables for spinning when it is loaded, which `import torch` may have done long ago.
    But it also stops spinning while it manages more threads than there are cores. So the watcher measures several times
    a second how many cores other processes use. While they need the cores of this process, it keeps additional idle
    threads. The number of computing threads stays the same, so the bits of all results do too.

    Args:
        openmp: GNU's library, as torch has loaded it.
        cores: numbers of the cores that this process may use.
    """

    def __init__(self, openmp: ctypes.CDLL, cores: frozenset[int]) -> None:
        self._openmp, self._cores = openmp, cores
        self._num_threads = 1
        self._end: threading.Event | None = None

    def expect(self, num_threads: int) -> None:
        """Raise the number of computing threads to at least this."""
        self._num_threads = max(self._num_threads, num_threads)

    @property
    def crowded(self) -> bool:
        """Whether waiting threads sleep now."""
        return self._end is not None

    def observe(self, others: float) -> None:
        """Let threads sleep if the cores have become crowded, or spin again if the cores have become quiet.

        Args:
            others: average number of cores that other processes kept busy since the last call.
        """
        free = max(0, len(self._cores) - self._num_threads)
        if self._end is None and self._num_threads > 1 and others > free + _CROWDED:
            self._end = threading.Event()
            # Together with the computing threads, one more than there are cores.
            idle = threading.Thread(target=self._keep_threads, args=(free + 2, self._end), daemon=True)
            idle.start()
        elif self._end is not None and others < free + _QUIET:
            self._end.set()
            self._end = None

    def _keep_threads(self, count: int, end: threading.Event) -> None:
        """Make OpenMP manage `count` more threads, including this one, until `end` is set."""
        nothing = ctypes.cast(self._openmp.omp_get_level, ctypes.c_void_p)  # any function without an effect
        self._openmp.GOMP_parallel(nothing, None, ctypes.c_uint(count), ctypes.c_uint(0))
        end.wait()

    def run(self) -> None:
        """Observe until the process ends."""
        before = time.monotonic(), busy_seconds(self._cores) - time.process_time()
        while True:
            time.sleep(_INTERVAL_S)
            now = time.monotonic(), busy_seconds(self._cores) - time.process_time()
            self.observe((now[1] - before[1]) / (now[0] - before[0]))
            before = now


def busy_seconds(cores: frozenset[int]) -> float:
    """Return the busy seconds of these cores, summed since the machine started.

    Raises:
        OSError: this system has no /proc/stat.
    """
    busy = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            ticks = [int(value) for value in values[:8]]  # these include the time of guests
            busy += sum(ticks) - ticks[3] - ticks[4]  # idle, and waiting for a disk
    return busy / os.sysconf("SC_CLK_TCK")


_lock = threading.Lock()
_watcher: Watcher | None = None


def watch_neighbours(num_threads: int) -> None:
    """Start the process's `Watcher`; if it is running already, only raise its number of threads.

    Does nothing if `num_threads` is 1, if the user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT, if torch uses an OpenMP
    other than GNU's, or if the system has no /proc/stat.

    Args:
        num_threads: threads with which this process computes.
    """
    global _watcher
    if num_threads < 2 or any(name in os.environ for name in _CHOSEN_BY_USER):
        return
    with _lock:
        if _watcher is None:
            openmp = find_openmp()
            if openmp is None or "gomp" not in Path(openmp).name:
                return
            cores = core_numbers()
            with contextlib.suppress(OSError):
                busy_seconds(cores)
                _watcher = Watcher(ctypes.CDLL(openmp), cores)
                threading.Thread(target=_watcher.run, name="quantkit-neighbours", daemon=True).start()
        if _watcher is not None:
            _watcher.expect(num_threads)
