"""Run a command as a whole process and say what it took.

Standard library only: what is said of a child's memory begins with that of its parent.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ALONE = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}  # for the Python of another environment
ONE_THREAD = {"OMP_NUM_THREADS": "1", "GPTQMODEL_CPU_WORKERS": "2"}  # fewer than two, of which one loads, it refuses


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a process and its children took, from start to exit.

    Args:
        code: exit code; negative = the signal that ended it.
        wall_s, cpu_s: seconds, imports and reading included.
        peak_mb: largest resident memory of the largest of the processes, MiB.
        others_cpu_s: CPU seconds that other processes took meanwhile: how quiet the machine was.
        said: the last line of its output.
    """

    code: int
    wall_s: float
    cpu_s: float
    peak_mb: int
    others_cpu_s: float
    said: str

    @property
    def others_share(self) -> float:
        """Of the whole machine, that other processes took meanwhile."""
        return round(self.others_cpu_s / max(self.wall_s, 0.01) / (os.cpu_count() or 1), 3)


def whole_path(program: str) -> str:
    """Its path, which is good in another folder too; symbolic links stay, by which a Python finds its environment."""
    return str(Path(shutil.which(program) or program).absolute())


def run_measured(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    limit_s: float = 3600,
) -> Usage:
    """Run a command, its output in a file.

    Args:
        command: with its arguments.
        log: of standard output and error; written anew.
        environment: variables beside those of this process; empty ones are removed.
        folder: in which it runs; None = this process's own, of which Python may import modules.
        limit_s: after which it is killed.
    """
    variables = {**os.environ, **(environment or {})}
    variables = {name: value for name, value in variables.items() if value}
    busy, started = busy_seconds(), time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=variables, cwd=folder, start_new_session=True
        )
    timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    finally:
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    lines = log.read_text(errors="replace").strip().splitlines()
    return Usage(
        code=process.returncode,
        wall_s=round(time.monotonic() - started, 2),
        cpu_s=round(cpu_s, 2),
        peak_mb=usage.ru_maxrss // 1024,
        others_cpu_s=round(max(busy_seconds() - busy - cpu_s, 0), 2),
        said=lines[-1] if lines else "",
    )


def run_forked(
    work: Callable[[], object], *, stdout: Path, stderr: Path, limit_s: float | None = None, limit_bytes: int = 0
) -> tuple[int | None, int]:
    """Call in a child that has the imports of this process, and leaves without what its parent has to tidy up.

    Linux only. Processes that the child has begun and left running are killed when it ends.

    Args:
        work: called; what it raises makes the exit code 1, but for SystemExit.
        stdout, stderr: files of the child's output, written anew; may be one.
        limit_s: after which it and what it has begun are killed; None = never.
        limit_bytes: of its data; 0 = any.
    Returns:
        exit code, negative = the signal that ended it, None = killed after `limit_s`; the most resident bytes.
    """
    sys.stdout.flush()  # else the child would write it again
    child = os.fork()
    if child == 0:
        os.setsid()
        _leave(work, stdout, stderr, limit_bytes)
    # Not a pipe, which stays open as long as any process that the child has forked.
    ended = os.pidfd_open(child)
    in_time = bool(select.select([ended], [], [], limit_s)[0])
    os.close(ended)
    os.killpg(child, signal.SIGKILL)  # before wait4, after which the number may be that of another group
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None, usage.ru_maxrss * 1024


def _leave(work: Callable[[], object], stdout: Path, stderr: Path, limit_bytes: int) -> NoReturn:
    """The child's part: call, and end the process."""
    code: object = 1
    try:
        for number, path in ((1, stdout), (2, stderr)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            os.dup2(descriptor, number)
            os.close(descriptor)
        if limit_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        work()
        code = 0
    except SystemExit as left:
        code = left.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def cpu_seconds(process: int, thread: int | None = None) -> float:
    """CPU seconds of a process so far, its threads included, or of one of them."""
    folder = f"/proc/{process}" if thread is None else f"/proc/{process}/task/{thread}"
    fields = Path(folder, "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """CPU seconds of the whole machine that were not idle; 0 where they are not told."""
    try:
        values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0
    return (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")
