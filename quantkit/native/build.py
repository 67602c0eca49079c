"""From C files to a loaded library: which machines, where it is kept, and that nobody else can put one there.

The cache is a folder of the user's own; the file name is a hash of sources, flags, compiler and CPU, so a stale
library is never loaded. It is written under another name and renamed: processes that build at once do no harm.
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
    """There will be no library; the message is the reason."""


def build_library(sources: Path, *, widest: str | None = None) -> tuple[Path, str]:
    """Compile what is not in the cache.

    Args:
        sources: folder of C files.
        widest: instructions that may be used, "avx2" or "avx512"; all others = whatever the CPU has.
    Returns:
        The library, and one line that says how it was made.
    Raises:
        BuildError: no suitable CPU or compiler, or it failed.
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
    """Instruction sets by their Linux names; empty where that cannot be asked."""
    line = re.search(r"^flags\s*:(.*)$", _said_by_linux("cpuinfo"), re.MULTILINE)
    return frozenset(line.group(1).split()) if line else frozenset()


def find_compiler() -> str:
    """Path of the C compiler: $CC, else gcc, else cc.

    Raises:
        BuildError: there is none.
    """
    for name in (os.environ.get("CC"), "gcc", "cc"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildError("no C compiler; install gcc, or name one in CC")


def find_openmp() -> str | None:
    """Path of the OpenMP library that torch has loaded into this process; None when there is none."""
    # For what it brings along: before that there is no OpenMP library in this process.
    import torch  # noqa: F401

    mapped = re.search(r"(/\S*/lib(?:gomp|iomp5)[^/\s]*)$", _said_by_linux("self/maps"), re.MULTILINE)
    return mapped.group(1) if mapped else None


def _said_by_linux(name: str) -> str:
    """A file of /proc; empty on other systems."""
    try:
        return Path("/proc", name).read_text()
    except OSError:
        return ""


def load_library(path: Path) -> ctypes.CDLL:
    """Open the library; its OpenMP calls go to torch's copy, so that there is one pool of threads.

    Raises:
        OSError: it cannot be loaded.
    """
    openmp = find_openmp()
    if openmp:
        # The library does not say whose OpenMP it wants, so it gets the one that all can see.
        ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def cache_folder() -> Path:
    """A folder that only this user can write: $XDG_CACHE_HOME/quantkit, or a fresh one for this process."""
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
    """Whether nobody but this user (and root) can put a file into this folder or another folder in its place."""
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
    """Compile all sources at once and link them; `library` appears complete or not at all.

    Linked without -fopenmp: that would bring in a second OpenMP runtime beside torch's.

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
    """Standard output of a command."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {(error.stderr.strip().splitlines() or ['no message'])[0]}") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took longer than {_TIMEOUT_S} s") from None
