"""Child processes: quantkit in a separate process, and work of unknown duration that can be stopped there."""

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable

from quantkit.machine.system import CAN_FORK, limit_process, status_bytes

QUANTKIT = "from quantkit.cli import main; main(prog_name='quantkit')"
"""Code that runs quantkit's command line."""
_START_S = 120.0  # to start Python and import what the work needs, on a busy machine


def python(code: str) -> list[str]:
    """Return the command of a Python that runs `code` with this process's import path; arguments may be appended.

    With `-m`, or with `-c` alone, Python would import from the current folder, which may be an untrusted model.
    """
    path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 - "" is the current folder
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path}; {code}"]


def ends_well(work: Callable[[], object], *, seconds: float, num_bytes: int | None = None) -> bool:
    """Whether a child finishes some work in time and without an error.

    The child is a fork or, where forks cannot compute, a new Python, which takes seconds and has no memory limit.

    Args:
        work: function to run; must be picklable, and must not use threads, which a forked child lacks.
        seconds: time limit; a new Python gets two minutes more.
        num_bytes: memory limit beyond what this process uses; None = no limit.
    """
    return _forked_ends_well(work, seconds, num_bytes) if CAN_FORK else _started_ends_well(work, seconds)


def _started_ends_well(work: Callable[[], object], seconds: float) -> bool:
    command = python("import pickle; pickle.load(sys.stdin.buffer)()")
    try:
        # This process made the pickle, so it is safe to load.
        done = subprocess.run(command, input=pickle.dumps(work), capture_output=True, timeout=_START_S + seconds)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _forked_ends_well(work: Callable[[], object], seconds: float, num_bytes: int | None) -> bool:
    ended, written = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            faulthandler.disable()
            # Added to what the fork inherits; otherwise the limit would be exceeded before any work.
            used = status_bytes("VmData") or 0
            limit_process(data_bytes=None if num_bytes is None else used + num_bytes)
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
