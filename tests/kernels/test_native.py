"""Compiling and choosing the C kernels: stale libraries, atomic files, and every way of doing without."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import pytest

from quantkit.cli import main
from quantkit.kernels import cpu
from quantkit.native import Library, build
from quantkit.numerics import native as numerics
from tests import forked

OF_KERNELS = ["test_linear.py", "test_native_attention.py", "test_ops.py"]
OF_NUMERICS = ["../compress/algorithms/test_gptq_loop.py", "../numerics/test_matmul.py"]
FOLDER = Path(cpu.__file__).parent
SOURCE = '__attribute__((visibility("default"))) int answer(void) { return 42; }\n'

CROSS_COMPILER = "aarch64-linux-gnu-gcc"

needs_compiler = pytest.mark.skipif(cpu.library() is None, reason=cpu.status())
only_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")


def test_it_is_switched_off_by_the_environment(monkeypatch):
    monkeypatch.setenv("QUANTKIT_NATIVE", "0")
    assert cpu.library() is None
    assert cpu.status() == "off: QUANTKIT_NATIVE=0"


@needs_compiler
def test_the_status_names_the_compiler_and_what_the_library_uses():
    assert cpu.status().startswith("compiled by ")
    for room in (cpu, numerics):
        amx = ", AMX" if room.library().qk_has_amx() else ""
        narrow = "AVX2" if platform.machine() == "x86_64" else "NEON with dot products"
        uses = f"uses AVX-512 with BF16 and VNNI{amx}" if room.has_avx512() else f"uses {narrow}"
        assert room.status().endswith(uses)


ALL = frozenset(build.INSTRUCTION_SETS["amx"])


@pytest.mark.parametrize(
    ("without", "widest", "names"),
    [
        ((), None, ["amx", "avx512", "avx2"]),
        ((), "1", ["amx", "avx512", "avx2"]),
        ((), "avx512", ["avx512", "avx2"]),
        ((), "avx2", ["avx2"]),
        (["amx_int8"], None, ["avx512", "avx2"]),
        (["avx512_vnni"], None, ["avx2"]),
        (["avx512_vnni"], "avx512", ["avx2"]),
    ],
)
def test_the_cpu_and_the_user_decide_which_libraries_are_suitable(monkeypatch, without, widest, names):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "cpu_flags", lambda: ALL - set(without))
    assert build.suitable_sets(widest) == names


# Of an Ampere Altra and a Raspberry Pi 4.
NEOVERSE_N1 = """processor	: 0
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer	: 0x41
"""
CORTEX_A72 = """processor	: 0
Features	: fp asimd evtstrm crc32 cpuid
"""


@pytest.mark.parametrize("widest", [None, "avx2", "neon"])
def test_a_cpu_of_arm_with_dot_products_has_one_library(monkeypatch, widest):
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(build, "_said_by_linux", lambda name: NEOVERSE_N1)
    assert build.suitable_sets(widest) == ["neon"]


@pytest.mark.parametrize(
    ("system", "machine", "said", "reason"),
    [
        ("Linux", "aarch64", CORTEX_A72, "this CPU has no atomics"),
        ("Linux", "riscv64", "", "there are none for Linux on riscv64, only for Linux on x86_64 and aarch64"),
        ("Darwin", "arm64", "", "there are none for Darwin on arm64, only for Linux on x86_64 and aarch64"),
    ],
)
def test_other_machines_are_told_why_there_is_no_library(monkeypatch, system, machine, said, reason):
    monkeypatch.setattr(build.platform, "system", lambda: system)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "_said_by_linux", lambda name: said)
    with pytest.raises(build.BuildError, match=reason):
        build.suitable_sets()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"there is no {CROSS_COMPILER}")
@pytest.mark.parametrize("folder", [FOLDER, Path(numerics.__file__).parent], ids=["kernels", "numerics"])
def test_all_c_files_compile_for_aarch64(folder, tmp_path):
    for file in folder.glob("*.[ch]"):
        shutil.copy(file, tmp_path)
    assert build.machine_of(CROSS_COMPILER) == "aarch64"
    build.compile_folder(CROSS_COMPILER, tmp_path, "neon")
    machine = build.library_file(tmp_path, "neon").read_bytes()[18:20]
    assert machine == b"\xb7\x00"  # EM_AARCH64 of elf.h


def test_a_compiler_asks_for_what_the_cpu_has_to_have():
    assert " ".join(flag for flag in build.compile_flags("amx") if flag.startswith("-m")) == (
        "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vbmi -mavx512bf16 -mavx512vnni "
        "-mamx-tile -mamx-bf16 -mamx-int8"
    )


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """The kernels' folder of a checkout on a CPU with AVX2, and in it the smallest of the C files; all take seconds."""
    if platform.machine() != "x86_64":
        pytest.skip("instruction sets of x86-64")
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(build.INSTRUCTION_SETS["avx2"]))
    (tmp_path / "pyproject.toml").touch()
    sources = tmp_path / "quantkit/kernels/cpu"
    sources.mkdir(parents=True)
    for name in ("quantkit.h", "amx.h", "avx2.h", "emulated.h", "scratch.c"):
        shutil.copy(FOLDER / name, sources)
    return sources


@needs_compiler
def test_in_a_checkout_the_first_use_compiles_the_library_of_this_cpu(checkout):
    library = build.find_library(checkout)
    assert library == build.library_file(checkout, "avx2")
    assert not build.load_library(library).qk_has_avx512()
    assert build.compiler_of(library) in cpu.status()
    written = library.stat().st_mtime_ns
    assert build.find_library(checkout).stat().st_mtime_ns == written


@needs_compiler
def test_a_library_of_other_sources_is_not_loaded(checkout, monkeypatch):
    stale = build.find_library(checkout)
    with (checkout / "quantkit.h").open("a") as file:
        file.write("/* another */\n")
    fresh = build.find_library(checkout)
    assert fresh != stale
    assert fresh.is_file()
    monkeypatch.setattr(build, "_COMPILE", (*build._COMPILE, "-O1"))
    assert build.find_library(checkout) not in (stale, fresh)


@needs_compiler
def test_a_compiler_that_does_not_know_amx_compiles_the_next_library(checkout, monkeypatch):
    monkeypatch.setattr(build, "cpu_flags", lambda: ALL)
    old = checkout / "old_gcc"
    old.write_text(f'#!/bin/sh\ncase "$*" in *amx*) exit 1;; esac\nexec {build.find_compiler()} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CC", str(old))
    assert build.find_library(checkout).name.startswith("avx512-")


def test_an_installed_program_takes_the_widest_library_and_compiles_nothing(checkout, monkeypatch):
    (checkout.parents[2] / "pyproject.toml").unlink()
    monkeypatch.setattr(build, "cpu_flags", lambda: ALL)
    monkeypatch.setattr(build, "_run", None)
    with pytest.raises(build.BuildError, match="installed without compiled kernels; install gcc, then"):
        build.find_library(checkout)
    for name in ("avx2", "avx512"):
        build.library_file(checkout, name).touch()
        assert build.find_library(checkout) == build.library_file(checkout, name)
    assert build.find_library(checkout, widest="avx2") == build.library_file(checkout, "avx2")


@only_x86
def test_a_cpu_without_avx2_has_no_library(monkeypatch):
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    library = Library(FOLDER)
    assert library.get() is None
    assert library.status() == "off: this CPU has no f16c"


def test_a_compiler_that_fails_is_named(checkout, monkeypatch):
    monkeypatch.setattr(build, "find_compiler", lambda: "/bin/false")
    library = Library(checkout)
    assert library.get() is None
    assert library.status() == "off: /bin/false failed: no message"


def test_a_checkout_of_another_user_is_told(checkout, monkeypatch):
    monkeypatch.setattr(build.os, "access", lambda path, mode: False)
    with pytest.raises(build.BuildError, match=r"cannot write .*/avx2-\w+\.so; run quantkit once as the owner"):
        build.find_library(checkout)


@needs_compiler
def test_a_torch_without_openmp_has_no_library(monkeypatch):
    monkeypatch.setattr(build, "find_openmp", lambda: None)
    assert Library(FOLDER).status() == "off: this torch has no OpenMP library, which the C kernels share"


def test_the_files_that_wider_cpus_run_again_are_there(request):
    assert [file for file in [*OF_KERNELS, *OF_NUMERICS] if not (request.path.parent / file).is_file()] == []


@needs_compiler
@pytest.mark.skipif(cpu.library() is None or not cpu.has_avx512(), reason="the tests beside this one do without it")
def test_the_kernels_without_avx512_pass_the_same_tests(request):
    done = run_again_with("avx2", [*OF_KERNELS, *OF_NUMERICS], request.path.parent)
    assert done.returncode == 0, done.stdout[-2000:]


@needs_compiler
@pytest.mark.skipif(not numerics.status().endswith(", AMX"), reason="the tests beside this one do without AMX already")
def test_what_amx_does_is_done_without_it(request):
    done = run_again_with("avx512", [*OF_KERNELS, *OF_NUMERICS], request.path.parent)
    assert done.returncode == 0, done.stdout[-2000:]


def run_again_with(widest, files, folder):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "native or gptq_loop or matmul", *files]
    environment = {**os.environ, "QUANTKIT_NATIVE": widest}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_without_a_compiler_the_advice_is_to_install_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(build.BuildError, match="no C compiler; install gcc"):
        build.find_compiler()


def finds_no_compiler(folder, settings, work):
    """Do some work where PATH has no compiler; what it says goes to a file."""
    os.environ.pop("CC", None)
    os.environ.update({"PATH": str(folder), **settings})
    build.library_file = lambda sources, name: folder / f"{name}.so"  # not compiled yet
    for library in (cpu._LIBRARY, numerics._LIBRARY):
        vars(library).pop("_loaded", None)  # imports have loaded it
    with (folder / "said").open("w") as stream, redirect_stdout(stream), redirect_stderr(stream):
        work()


def said_without_a_compiler(folder, work, **settings):
    """Lines about the C kernels."""
    assert forked.run(finds_no_compiler, folder, settings, work) == 0
    return [line for line in (folder / "said").read_text().splitlines() if "C kernels" in line]


COMMAND = ("generate", "--prompt", "a", "--max-tokens", "2")


def command(*words):
    main(list(words))


def generate_from_python():
    from quantkit import LLM, SamplingParams

    LLM().generate("a", SamplingParams(max_tokens=1))


def load_both_libraries():
    assert cpu.library() is numerics.library() is None


@pytest.mark.parametrize(
    "work",
    [partial(command, *COMMAND), generate_from_python, load_both_libraries],
    ids=["command", "python", "both libraries"],
)
def test_without_a_compiler_one_line_says_so_with_the_remedy(work, tmp_path):
    (line,) = said_without_a_compiler(tmp_path, work)
    assert "no C compiler; install gcc, or set CC to the path of one" in line
    assert line.endswith("QUANTKIT_NATIVE=0 hides this line")


@pytest.mark.parametrize(
    ("words", "settings"),
    [(COMMAND, {"QUANTKIT_NATIVE": "0"}), ((*COMMAND, "--quiet"), {}), (COMMAND, {"LOCAL_RANK": "1"})],
    ids=["switched off", "quiet", "second of several ranks"],
)
def test_nothing_is_said_where_nobody_asked(words, settings, tmp_path):
    assert said_without_a_compiler(tmp_path, partial(command, *words), **settings) == []


@needs_compiler
def test_a_library_that_does_not_compile_is_not_left_behind(tmp_path):
    source = tmp_path / "broken.c"
    source.write_text("int f(void) { return nothing; }\n")
    with pytest.raises(build.BuildError, match=r"failed: .*broken\.c"):
        build.compile_library(build.find_compiler(), ("-O0",), [source], tmp_path / "broken.so")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.c"]


@needs_compiler
def test_two_builds_at_once_do_no_harm(tmp_path):
    source, library = tmp_path / "answer.c", tmp_path / "answer.so"
    source.write_text(SOURCE)
    arguments = (build.find_compiler(), ("-O0", "-fPIC"), [source], library)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(build.compile_library, *arguments) for _ in range(4)]:
            done.result()
    assert ctypes.CDLL(str(library)).answer() == 42
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answer.c", "answer.so"]


def test_a_compiler_that_says_nothing_is_no_compiler(checkout, monkeypatch, tmp_path):
    silent = tmp_path / "cc"
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o755)
    monkeypatch.setattr(build, "find_compiler", lambda: str(silent))
    library = Library(checkout)
    assert library.get() is None
    assert library.status().startswith("off: ")


def test_a_compiler_that_takes_too_long_is_stopped(monkeypatch, tmp_path):
    source = tmp_path / "one.c"
    source.write_text("int one;")
    slow = tmp_path / "cc"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(build, "_TIMEOUT_S", 0.2)
    with pytest.raises(build.BuildError, match="took longer"):
        build.compile_library(str(slow), (), [source], tmp_path / "one.so")


@needs_compiler
def test_there_is_one_openmp_in_the_process():
    code = (
        "from quantkit.kernels import cpu; from pathlib import Path; assert cpu.library()\n"
        "names = {line.split()[-1] for line in Path('/proc/self/maps').read_text().splitlines() if 'gomp' in line}\n"
        "print(len(names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("0", "1")


def test_the_sources_are_packaged():
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for files in ("kernels/cpu/*.[ch]", "numerics/native/*.[ch]", "native/aarch64/*.h"):
        assert files in pyproject
