"""Compilation of C files into a loaded library, kept in a cache that only the user can write.

The cache is a private folder. A library's file name is a hash of sources, flags, compiler and CPU, so a stale library
is never loaded. A library is written under a temporary name and renamed, so processes can build it at the same time.
"""

import atexit
import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# CPU flags of what the C files are written for: as QK_AVX512 in quantkit.h, and what does without.
_WITH_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_bf16", "avx512_vnni")
_LEAST = ("avx2", "fma", "f16c")
# By the widest instructions that stay; the C files use AMX only beside AVX-512. Not every compiler knows -mno-amx-tile.
_WITHOUT = {"avx2": "-mno-avx512f", "avx512": "-U__AMX_TILE__"}
_UNREAD = ("-fno-math-errno", "-fno-trapping-math")  # nobody reads either, and both keep loops from being vectors
_COMPILE = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fvisibility=hidden", *_UNREAD)
_LINK = ("-shared", "-lm")
_TIMEOUT_S = 120


class BuildError(Exception):
    """The library cannot be built; the message is the reason."""


def build_library(sources: Path, *, widest: str | None = None) -> tuple[Path, str]:
    """Return the library, compiled unless it is in the cache.

    Args:
        sources: folder of C files.
        widest: widest instructions allowed, "avx2" or "avx512"; anything else = all that the CPU has.
    Returns:
        The library, and one line that says how it was built.
    Raises:
        BuildError: there is no suitable CPU or compiler, or the compiler failed.
    """
    flags = cpu_flags()
    missing = [flag for flag in _LEAST if flag not in flags]
    if missing:
        raise BuildError(f"this CPU has no {missing[0]}")
    if not flags.issuperset(_WITH_AVX512):
        widest = "avx2"
    left_out = [_WITHOUT[widest]] if widest in _WITHOUT else []
    compiler = find_compiler()
    version = (_run([compiler, "--version"]).splitlines() or [""])[0]
    files = sorted(sources.glob("*.[ch]"))
    compile_flags = (*_COMPILE, *["-fopenmp"] * bool(find_openmp()), *left_out)
    digest = hashlib.sha256("\0".join([version, *compile_flags, *sorted(flags)]).encode())
    for source in files:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = cache_folder()
    library = folder / f"quantkit-{digest.hexdigest()[:32]}.so"
    if not library.is_file():
        compile_library(compiler, compile_flags, [s for s in files if s.suffix == ".c"], library)
    threads = "" if find_openmp() else ", one thread: torch has no OpenMP library to share"
    return library, f"compiled by {version}{threads}"


def cpu_flags() -> frozenset[str]:
    """Return instruction sets by their Linux names; empty on other systems."""
    line = re.search(r"^flags\s*:(.*)$", _said_by_linux("cpuinfo"), re.MULTILINE)
    return frozenset(line.group(1).split()) if line else frozenset()


def find_compiler() -> str:
    """Return the path of the C compiler: $CC, or else gcc, or else cc.

    Raises:
        BuildError: there is no C compiler.
    """
    for name in (os.environ.get("CC"), "gcc", "cc"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildError("no C compiler; install gcc, or set CC to the path of one")


def find_openmp() -> str | None:
    """Return the path of the OpenMP library that torch has loaded into this process; None if there is none."""
    # For what it brings along: before that there is no OpenMP library in this process.
    import torch  # noqa: F401

    mapped = re.search(r"(/\S*/lib(?:gomp|iomp5)[^/\s]*)$", _said_by_linux("self/maps"), re.MULTILINE)
    return mapped.group(1) if mapped else None


def _said_by_linux(name: str) -> str:
    """Return the contents of a file in /proc; empty on other systems."""
    try:
        return Path("/proc", name).read_text()
    except OSError:
        return ""


def load_library(path: Path) -> ctypes.CDLL:
    """Load the library; its OpenMP calls go to torch's copy, so that there is one thread pool.

    Raises:
        OSError: the library cannot be loaded.
    """
    openmp = find_openmp()
    if openmp:
        # The library does not say whose OpenMP it wants, so it gets the one that all can see.
        ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def cache_folder() -> Path:
    """Return a folder that only this user can write: $XDG_CACHE_HOME/quantkit, or a temporary one."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "quantkit" / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(folder) and os.access(folder, os.W_OK):
            return folder
    fresh = Path(tempfile.mkdtemp(prefix="quantkit-"))
    atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    return fresh


def is_private(folder: Path) -> bool:
    """Whether only this user (and root) can put files into this folder or replace one of its parents."""
    resolved = folder.resolve()
    own = resolved.stat()
    if own.st_uid != os.getuid() or own.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    for parent in resolved.parents:
        info = parent.stat()
        shared = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not info.st_mode & stat.S_ISVTX
        if info.st_uid not in (0, os.getuid()) or shared:
            return False
    return True


def compile_library(compiler: str, flags: tuple[str, ...], sources: list[Path], library: Path) -> None:
    """Compile and link all sources; `library` appears complete or not at all.

    It links without -fopenmp, which would add a second OpenMP runtime next to torch's.

    Raises:
        BuildError: the compiler failed; the message has its first line.
    """
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as work:
        objects = [str(Path(work) / f"{source.stem}.o") for source in sources]
        commands = [[compiler, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, commands))
        finished = Path(work) / library.name
        _run([compiler, *objects, *_LINK, "-o", str(finished)])
        with finished.open("rb") as file:
            os.fsync(file.fileno())  # or the machine could stop after the renaming and before the writing
        finished.replace(library)


def _run(command: list[str]) -> str:
    """Return the standard output of a command."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {(error.stderr.strip().splitlines() or ['no message'])[0]}") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took longer than {_TIMEOUT_S} s") from None
