"""Compile the C files of a folder to one library per instruction set, and choose the library for this CPU.

`setup.py` compiles all libraries into a wheel, so an installed quantkit compiles nothing. In a checkout, the first use
compiles the library that this CPU needs, in the folder of its sources. A library's file name contains a hash of its
sources and flags, so a stale library is never loaded. A library is written under a temporary name and then renamed, so
several processes can build it at the same time.

This module uses only the standard library at import, because `setup.py` imports it before anything is installed.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_bf16", "avx512_vnni")
INSTRUCTION_SETS = {
    "amx": (*_AVX512, "amx_tile", "amx_bf16", "amx_int8"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon": ("asimd", "atomics", "asimddp"),
}
"""CPU flags (Linux's names) that a library is compiled for, keyed by instruction set, from the widest set to the
narrowest. The C files test for no other flags; see, for example, QK_AVX512 in quantkit.h.
"""
OF_MACHINES = {"x86_64": ("amx", "avx512", "avx2"), "aarch64": ("neon",)}
"""Names of the instruction sets of a machine, keyed by its name in `platform.machine()` and in compilers."""

_UNREAD = ("-fno-math-errno", "-fno-trapping-math")  # setting errno and keeping traps would prevent vectorization
_COMPILE = ("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-fopenmp", *_UNREAD)
_LINK = ("-shared", "-lm", "-s")
_TIMEOUT_S = 120


class BuildError(Exception):
    """There is no library for this CPU; the message says why."""


def find_library(sources: Path, *, widest: str | None = None) -> Path:
    """Return the library for this CPU; in a checkout, compile it if it is missing or stale.

    Args:
        sources: folder of C files and libraries, e.g. quantkit/kernels/cpu.
        widest: name of the widest instruction set to use; any other value = no limit.
    Raises:
        BuildError: this CPU lacks instructions, or its library is not installed or cannot be compiled.
    """
    suitable = suitable_sets(widest)
    in_checkout = (sources.parents[2] / "pyproject.toml").is_file()
    for name in suitable:
        library = library_file(sources, name)
        if in_checkout and not library.is_file():
            if not os.access(sources, os.W_OK):
                raise BuildError(f"this user cannot write {library}; run quantkit once as the owner of that folder")
            compiler = find_compiler()
            if name == suitable[-1] or knows(compiler, name):
                compile_folder(compiler, sources, name)
        if library.is_file():
            return library
    raise BuildError("quantkit was installed without compiled kernels; install gcc, then install quantkit again")


def suitable_sets(widest: str | None = None) -> list[str]:
    """Return the names of the instruction sets that this CPU has, without those wider than `widest`.

    Raises:
        BuildError: this CPU has none of the instruction sets.
    """
    flags, names = cpu_flags(), OF_MACHINES.get(platform.machine(), ())
    if not flags or not names:
        machines = " and ".join(OF_MACHINES)
        here = f"{platform.system()} on {platform.machine()}"
        raise BuildError(f"there are none for {here}, only for Linux on {machines}")
    allowed = names[names.index(widest) :] if widest in names else names
    if missing := [flag for flag in INSTRUCTION_SETS[names[-1]] if flag not in flags]:
        raise BuildError(f"this CPU has no {missing[0]}")
    return [name for name in allowed if flags.issuperset(INSTRUCTION_SETS[name])]


def library_file(sources: Path, name: str) -> Path:
    """Return the path of a folder's library for an instruction set, whether or not it exists."""
    digest = hashlib.sha256("\0".join([*compile_flags(name), *_LINK]).encode())
    for source in sorted(sources.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return sources / f"{name}-{digest.hexdigest()[:16]}.so"


def compile_flags(name: str) -> tuple[str, ...]:
    """Return the compiler flags for an instruction set; they do not depend on the machine that compiles."""
    if name == "neon":
        # Without the last option, GCC moves so many loads to the front that sums no longer fit into the registers.
        return (*_COMPILE, "-march=armv8.2-a+dotprod", "-fno-schedule-insns")
    as_options = (flag.replace("avx512_", "avx512").replace("_", "-") for flag in INSTRUCTION_SETS[name])
    return (*_COMPILE, *[f"-m{option}" for option in as_options])


def knows(compiler: str, name: str) -> bool:
    """Whether a compiler is new enough to compile for an instruction set."""
    try:
        _run([compiler, *compile_flags(name), "-fsyntax-only", "-x", "c", os.devnull])
    except BuildError:
        return False
    return True


def machine_of(compiler: str) -> str:
    """Return the machine that a compiler compiles for, such as aarch64; this machine if the compiler does not name one.

    Raises:
        BuildError: the compiler failed.
    """
    return _run([compiler, "-dumpmachine"]).partition("-")[0].strip() or platform.machine()


def compiler_of(library: Path) -> str:
    """Return the name and version of the compiler that made a library, as recorded in the library."""
    version = re.search(rb"GCC: \([^)]*\) [\d.]+|clang version [\d.]+", library.read_bytes())
    return version.group().decode().replace("GCC:", "GCC") if version else "an unknown compiler"


def cpu_flags() -> frozenset[str]:
    """Return the CPU's instruction sets, by their Linux names; empty on other systems."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", _said_by_linux("cpuinfo"), re.MULTILINE)
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
    # The import loads torch's OpenMP library into this process.
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
    """Load a compiled library. Its OpenMP calls go to torch's OpenMP library, so that there is only one thread pool.

    Raises:
        BuildError: torch has no OpenMP library.
        OSError: the library cannot be loaded.
    """
    openmp = find_openmp()
    if openmp is None:
        raise BuildError("this torch has no OpenMP library, which the C kernels share")
    # The library does not name an OpenMP library, so it uses the one that is loaded globally.
    ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def compile_folder(compiler: str, sources: Path, name: str) -> None:
    """Compile the C files of a folder for an instruction set, into that folder.

    Raises:
        BuildError: the compiler failed; the message has its first line.
    """
    # Not among `compile_flags`, whose hash is in the library's name, because this path differs between machines.
    include = ("-I", str(Path(__file__).parent / "aarch64")) if name == "neon" else ()
    flags, files = (*compile_flags(name), *include), sorted(sources.glob("*.c"))
    compile_library(compiler, flags, files, library_file(sources, name))


def compile_library(compiler: str, flags: tuple[str, ...], sources: list[Path], library: Path) -> None:
    """Compile sources and link them to the file `library`, which is complete as soon as it exists.

    Link without -fopenmp, which would add a second OpenMP library to that of torch.

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
            os.fsync(file.fileno())  # otherwise a crash after the renaming could leave an incomplete file
        finished.replace(library)


def _run(command: list[str]) -> str:
    """Run a command and return its standard output.

    Raises:
        BuildError: the command failed or took too long.
    """
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {(error.stderr.strip().splitlines() or ['no message'])[0]}") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took longer than {_TIMEOUT_S} s") from None
