"""Let OpenMP's waiting threads sleep while other processes need the cores.

A waiting thread of GNU OpenMP spins for milliseconds before it sleeps. On a quiet machine this saves time. Beside a
busy process, threads spin while the thread that they wait for has lost its core, and a run takes several times as long.

The library reads the environment variables for this when it is loaded, which `import torch` may have done long ago.
But it also stops spinning while it manages more threads than there are cores. So a watcher measures several times a
second how many cores other processes use. While these processes need our cores, it keeps additional idle threads. The
number of computing threads stays the same, and so do the bits of all results.
"""

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path

from quantkit.machine.system import core_numbers
from quantkit.native.build import find_openmp

_INTERVAL_S = 0.2
# Cores used by others, beyond the free ones: above the first, threads share cores; below the second, they no longer do.
_CROWDED, _QUIET = 0.25, 0.15
_CHOSEN_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


class Watcher:
    """Switch OpenMP between spinning and sleeping, by the cores that other processes use.

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
        """Switch if the cores have become crowded or quiet.

        Args:
            others: cores that other processes kept busy since the last call.
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
    """Start the watcher, once per process; later calls may raise the number of threads.

    Does nothing if the user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT, if torch uses an OpenMP other than GNU's, or
    if the system has no /proc/stat.

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
