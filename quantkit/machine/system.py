"""Calls that differ between Linux, macOS and Windows: locks, limits, cores, memory, and child processes.

macOS has no /proc, and no signal when a parent dies. Windows also lacks `fcntl`, `resource` and folders that can be
opened. Locks are kernel locks on every system. They end with the process, so no lock is ever stale. No other module
imports Python modules that exist on one system only. This module does not import torch, because OpenMP reads its
settings when torch is imported.
"""

import contextlib
import ctypes
import faulthandler
import hashlib
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl
    import resource

CAN_DELETE_OPEN_FILES = sys.platform != "win32"
CAN_FORK = sys.platform == "linux"
"""Whether a forked child can compute. Windows has no fork, and libraries of macOS crash in a forked child."""
QUANTKIT = "from quantkit.cli import main; main(prog_name='quantkit')"
"""Python code that runs quantkit's command line, to be passed to `python`."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # a child must load no library between fork and exec
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_LOCKED_BYTE = 1 << 30  # Windows locks bytes against reading too, so this one is past the end of every file
_RETRY_S = 0.1
_START_S = 120.0  # to start Python and import what the work needs, on a busy machine
_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MOST_SOCKETS = 8192  # Windows has no limit; this is more than a server of one model needs


def lock(descriptor: int, *, wait: bool) -> None:
    """Lock an open file until it is closed or this process ends.

    Args:
        descriptor: the open file; on Windows, it must be open for writing.
        wait: whether to wait until no other process holds the lock.
    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
    """
    if sys.platform == "win32":
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        while True:
            try:
                os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
                break
            except PermissionError as error:
                if not wait:
                    raise BlockingIOError(*error.args) from None
                time.sleep(_RETRY_S)
            finally:
                os.lseek(descriptor, position, os.SEEK_SET)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Wait for a lock on a folder and hold it while the block runs; no file appears in the folder.

    On Windows, which cannot open folders, the lock is on an empty file in the user's temporary folder. The file is not
    deleted.
    """
    if sys.platform == "win32":
        name = hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:16]
        path, flags = Path(tempfile.gettempdir(), f"quantkit-{name}.lock"), os.O_RDWR | os.O_CREAT
    else:
        path, flags = folder, os.O_RDONLY
    descriptor = os.open(path, flags)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the names of a folder's files to the disk, because flushing a file saves only its contents.

    Does nothing on Windows, which writes names to its journal.
    """
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def user_id() -> int | None:
    """Return the id of the user whose rights this process has; None on Windows, where files have no user id."""
    return None if sys.platform == "win32" else os.geteuid()


def core_numbers() -> frozenset[int]:
    """Return the numbers of the cores on which this process may run; outside Linux, these are all cores."""
    return frozenset(os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1))


def available_cores() -> int:
    """Return the number of cores that this process may use, at least 1: the number in its affinity mask, or the cgroup
    quota if that is lower.
    """
    allowed = len(core_numbers())
    quota = cgroup_quota()
    return allowed if quota is None else max(1, min(allowed, quota))


def cgroup_quota(root: Path = _CGROUPS, own: Path = _OWN) -> int | None:
    """Return the number of whole cores that cgroups (versions 1 and 2) allow this process, at least 1; None = no limit.

    Args:
        root: folder where cgroups are mounted.
        own: file in which Linux lists the groups of this process.
    """
    quotas = [quota for folder in _folders(root, own) if (quota := _quota(folder)) is not None]
    # The lowest quota from the root to the group of the process counts: systemd and Slurm set it at levels in between.
    return min(quotas, default=None)


def _folders(root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders that may hold a quota: the mounts of cgroups, and this process's groups from the lowest up."""
    mounts = {"cpu": (root / "cpu",), "": (root, root / "unified")}
    for several in mounts.values():
        yield from several
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux, or /proc is not mounted
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        names = [part for part in path.split("/") if part]
        # In version 2, the controllers are empty. A path with ".." is outside of what this container sees.
        for controller in {"cpu", ""}.intersection(controllers.split(",")) if ".." not in names else ():
            for mount in mounts[controller]:
                yield from (mount.joinpath(*names[:end]) for end in range(len(names), 0, -1))


def _quota(folder: Path) -> int | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        # Rounded down: with one thread too many, the quota is used up early, and then all threads wait.
        return max(1, int(quota) // int(period)) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or "max", which means no limit
        return None


def status_bytes(key: str) -> int | None:
    """Return, in bytes, the entry of /proc/self/status with this key, e.g. `VmRSS:   12 kB`; None if there is none."""
    with contextlib.suppress(OSError):
        entry = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(entry[1]) * 1024 if entry else None
    return None


def peak_bytes() -> int:
    """Return the highest resident memory of this process so far, in bytes, as the kernel counts it.

    /proc is read if possible, because the value of getrusage includes the program that started this process.
    """
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    unit = 1 if sys.platform == "darwin" else 1024
    return status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    import psutil

    # psutil is only the fallback: it finds a process by its number, and /proc may show those of another namespace.
    return status_bytes("VmRSS") or int(psutil.Process().memory_info().rss)


def limit_process(
    *, cpu_seconds: int | None = None, address_bytes: int | None = None, data_bytes: int | None = None
) -> None:
    """Limit the CPU time and memory of this process permanently, and write no core file if it crashes.

    Windows has no such limits, and macOS may ignore limits of memory, so the parent process must limit the time too.
    """
    if sys.platform == "win32":
        return
    limits = {resource.RLIMIT_CPU: cpu_seconds, resource.RLIMIT_AS: address_bytes, resource.RLIMIT_DATA: data_bytes}
    for kind, limit in {**limits, resource.RLIMIT_CORE: 0}.items():
        if limit is not None:
            most = resource.getrlimit(kind)[1]
            limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
            with contextlib.suppress(*(() if sys.platform == "linux" else (OSError, ValueError))):
                resource.setrlimit(kind, (limit, limit))


def has_memory_limit() -> bool:
    """Whether the address space of this process is limited."""
    return sys.platform != "win32" and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def max_open_files() -> int:
    """Return the number of files and sockets that this process may have open."""
    return _MOST_SOCKETS if sys.platform == "win32" else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies; does nothing on systems other than Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_DEATH_SIGNAL, number)


def killed_with_parent() -> Callable[[], object] | None:
    """Return a `preexec_fn` for a child that must not outlive its parent; None on systems other than Linux."""
    return partial(end_with_parent, signal.SIGKILL) if CAN_FORK else None


def after_fork(work: Callable[[], object]) -> None:
    """Make every forked child of this process call a function before anything else; on Windows, there are no forks."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=work)


def python(code: str) -> list[str]:
    """Return the command that runs `code` in a new Python with this process's import path; arguments may be appended.

    With `-m`, or with `-c` alone, Python would import modules from the current folder, which may be an untrusted model.
    """
    path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 - "" is the current folder
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path}; {code}"]


def ends_well(work: Callable[[], object], *, seconds: float, num_bytes: int | None = None) -> bool:
    """Run a function in a child process, and return whether it finished in time and without an error.

    The child is a fork of this process. On systems where a fork cannot compute, it is a new Python, which takes seconds
    to start and has no memory limit.

    Args:
        work: function to run; must be picklable, and must not use threads of this process, which a fork does not have.
        seconds: time limit; a new Python gets two more minutes to start.
        num_bytes: bytes that the child may allocate in addition to the memory of this process; None = no limit.
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
            # The limit is added to the memory that the fork inherits, which alone may exceed it.
            used = status_bytes("VmData") or 0
            limit_process(data_bytes=None if num_bytes is None else used + num_bytes)
            work()
            # Not sys.exit: the parent's buffers and exit handlers must not be run a second time.
            os._exit(0)
        finally:
            os._exit(1)
    os.close(written)
    try:
        # The pipe closes when the child ends, however it does, unless the child has left processes that keep it open.
        is_done = bool(select.select([ended], [], [], seconds)[0])
    finally:
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    return is_done and status == 0
