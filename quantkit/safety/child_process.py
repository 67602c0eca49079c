"""Child processes: quantkit in a separate process, and work of unknown duration that can be stopped there."""

import contextlib
import faulthandler
import os
import resource
import select
import signal
import sys
from collections.abc import Callable

QUANTKIT = "from quantkit.cli import main; main(prog_name='quantkit')"
"""Code that runs quantkit's command line."""


def python(code: str) -> list[str]:
    """Return the command of a Python that runs `code` with this process's import path; arguments may be appended.

    With `-m`, or with `-c` alone, Python would import from the current folder, which may be an untrusted model.
    """
    path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 - "" is the current folder
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path}; {code}"]


def ends_well(work: Callable[[], object], *, seconds: float, num_bytes: int | None = None) -> bool:
    """Whether a forked child finishes some work in time and without an error.

    Args:
        work: function to run; must not use threads, which a forked child lacks.
        seconds: time limit.
        num_bytes: memory limit beyond what this process uses; None = no limit.
    """
    ended, written = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            faulthandler.disable()
            # A crash is one of the expected ends and leaves no core file behind.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if num_bytes is not None:
                _limit_data(num_bytes)
            work()
            # Not sys.exit: the parent's buffers and exit handlers must not be run a second time.
            os._exit(0)
        finally:
            os._exit(1)
    os.close(written)
    try:
        # The pipe closes when the child ends, however it does.
        is_done = bool(select.select([ended], [], [], seconds)[0])
    finally:
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    return is_done and status == 0


def _limit_data(num_bytes: int) -> None:
    with open("/proc/self/status") as file:  # noqa: PTH123 - a child imports nothing
        sizes = [int(line.split()[1]) << 10 for line in file if line.startswith("VmData:")]
    # Added to what the fork inherits; otherwise the limit would be exceeded before any work.
    limit, most = sum(sizes) + num_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
