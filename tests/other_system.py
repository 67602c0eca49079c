"""Commands of quantkit in one process that pretends to be macOS or Windows, as far as Python and its files go.

    python -m tests.other_system win32 < [["plan", "--recipe", "rtn-int4"], ...]

Libraries are imported first, because theirs is the code of this system. Then Python's modules and functions that the
other system lacks are hidden, and so is /proc. As Windows does, files that are open cannot be moved or deleted, nor can
folders that hold such files, and folders cannot be opened. The answer is [[exit code, stdout, stderr], ...]. Not
pretended: paths with backslashes, other processors, and how libraries behave there.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import importlib
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIBRARIES = (
    *("accelerate", "click.testing", "compressed_tensors", "datasets", "gguf", "multiprocessing.context", "numpy"),
    *("psutil", "rich.console", "rich.progress", "safetensors.torch", "torch", "torch._dynamo", "transformers"),
    *("torch.utils._pytree", "transformers.generation.utils", "transformers.models.llama.modeling_llama"),
)
LINUX_ONLY = {
    "os": {
        *("copy_file_range", "eventfd", "memfd_create", "posix_fadvise", "posix_fallocate", "pidfd_open", "setns"),
        *("sched_getaffinity", "sched_setaffinity", "splice", "unshare", "getresuid", "O_DIRECT", "O_PATH"),
    },
    "signal": {"SIGPWR", "SIGRTMIN", "SIGRTMAX", "SIGSTKFLT", "SIGPOLL"},
    "mmap": {"MAP_POPULATE", "MAP_NORESERVE"},
    "socket": {"AF_NETLINK", "AF_VSOCK"},
    "time": {"CLOCK_BOOTTIME", "CLOCK_TAI"},
}
NOT_ON_WINDOWS = {
    "os": {
        *("chown", "fchmod", "fchown", "fdatasync", "fork", "getegid", "geteuid", "getgid", "getgroups", "getloadavg"),
        *("getpgid", "getuid", "initgroups", "killpg", "lchown", "mkfifo", "mknod", "nice", "openpty", "posix_spawn"),
        *("pread", "preadv", "pwrite", "pwritev", "register_at_fork", "sched_yield", "sendfile", "setpgid", "setsid"),
        *("setuid", "statvfs", "fstatvfs", "sysconf", "ttyname", "uname", "wait", "wait3", "wait4", "WNOHANG"),
        *("O_CLOEXEC", "O_DIRECTORY", "O_DSYNC", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "WIFEXITED", "WIFSIGNALED"),
    },
    "signal": {
        *("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGUSR1", "SIGUSR2"),
        *("alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "sigwait"),
    },
    "mmap": {"MAP_ANONYMOUS", "MAP_PRIVATE", "MAP_SHARED", "PROT_READ", "PROT_WRITE", "MADV_DONTNEED"},
    "socket": {"AF_UNIX", "SCM_RIGHTS", "socketpair"},
    "time": {"CLOCK_MONOTONIC", "CLOCK_PROCESS_CPUTIME_ID", "clock_gettime"},
}
NO_MODULES_OF_WINDOWS = ("curses", "fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
_REAL = types.SimpleNamespace(open=open, listdir=os.listdir, readlink=os.readlink)


def lacks(system: str) -> dict[str, set[str]]:
    """Names by module that this Python has and the other system's lacks."""
    more = NOT_ON_WINDOWS if system == "win32" else {}
    return {module: names | more.get(module, set()) for module, names in LINUX_ONLY.items()}


def pretend(system: str, libraries: tuple[str, ...] = LIBRARIES) -> None:
    """Make this process one of the other system, for good, with these libraries imported before."""
    for name in libraries:
        importlib.import_module(name)
    import psutil
    import torch

    process = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=1 << 28, peak_wset=1 << 29))
    psutil.Process, psutil.virtual_memory = lambda: process, lambda: types.SimpleNamespace(available=8 << 30)
    torch.ops.mkldnn, torch.ops.onednn = object(), object()  # torch for other processors has neither
    _hide_proc()
    if system == "win32":
        _add_msvcrt()
        sys.modules |= dict.fromkeys(NO_MODULES_OF_WINDOWS)
        _guard_files()
    subprocess.os, subprocess.signal = types.SimpleNamespace(**vars(os)), types.SimpleNamespace(**vars(signal))
    shutil.disk_usage = lambda _: types.SimpleNamespace(free=1 << 40)
    shutil._use_fd_functions = shutil._USE_CP_SENDFILE = False
    for module, names in lacks(system).items():
        for name in names & vars(sys.modules[module]).keys():
            delattr(sys.modules[module], name)
    sys.platform = system


def _hide_proc() -> None:
    def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(path, int) and os.fspath(path).startswith(("/proc", "/sys")):
                raise FileNotFoundError(errno.ENOENT, "no such file on this system", path)
            return function(path, *args, **options)

        return call

    builtins.open = io.open = hidden(open)
    os.stat, os.listdir, os.open = hidden(os.stat), hidden(os.listdir), hidden(os.open)


def _add_msvcrt() -> None:
    """Give locks of bytes that belong to the open file, as those of Windows do."""
    import fcntl

    def locking(descriptor: int, mode: int, count: int) -> None:
        start = os.lseek(descriptor, 0, os.SEEK_CUR)
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, count, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            raise PermissionError(errno.EACCES, "Permission denied") from error

    module = types.ModuleType("msvcrt")
    module.LK_NBLCK, module.locking = 2, locking
    sys.modules["msvcrt"] = module


def _guard_files() -> None:
    def check_closed(path: Any) -> None:
        inside = Path(os.path.realpath(path.path if isinstance(path, os.DirEntry) else path))
        for used in _used_files():
            if Path(used).is_relative_to(inside):
                raise PermissionError(errno.EACCES, f"{used} is being used by a process", str(path))

    def guarded(function: Callable[..., Any], is_rename: bool = False) -> Callable[..., Any]:
        def call(path: Any, *others: Any, **options: Any) -> Any:
            for each in (path, *others[:1]):
                check_closed(each)
            if is_rename and os.path.lexists(others[0]):
                raise FileExistsError(errno.EEXIST, "the target exists", str(others[0]))
            return function(path, *others, **options)

        return call

    os.unlink = os.remove = guarded(os.unlink)
    os.rmdir, os.replace, os.rename = guarded(os.rmdir), guarded(os.replace), guarded(os.rename, is_rename=True)
    opened = os.open

    def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, *args, **options)

    os.open = open_file


def _used_files() -> Iterator[str]:
    for descriptor in _REAL.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield _REAL.readlink(f"/proc/self/fd/{descriptor}")
    with _REAL.open("/proc/self/maps") as file:
        yield from {line.split(maxsplit=5)[5].strip() for line in file if "/" in line}


def run(command: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, which are pipes with the code page that Windows has in many countries."""
    from quantkit.__main__ import main

    before, streams = (sys.stdout, sys.stderr, sys.argv), [io.BytesIO(), io.BytesIO()]
    pipes = [io.TextIOWrapper(stream, "cp1252" if sys.platform == "win32" else "utf-8") for stream in streams]
    sys.stdout, sys.stderr, sys.argv = *pipes, ["quantkit", *command]
    try:
        main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout, sys.stderr, sys.argv = before
    for pipe in pipes:
        pipe.flush()
    stdout, stderr = (stream.getvalue().decode() for stream in streams)
    return code, stdout, stderr


if __name__ == "__main__":
    pretend(sys.argv[1])
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump([run(command) for command in json.load(sys.stdin)], results)
