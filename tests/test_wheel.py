"""Wheels that setup.py makes: what is in them, for which platform, and what happens without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quantkit.native import build

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[1]
FOLDERS = ("quantkit/kernels/cpu", "quantkit/numerics/native")
# Writes what a linker would: the version of glibc that the library needs.
COMPILER = """#!/bin/sh
[ "$1" = -dumpmachine ] && exec echo "$MACHINE"
case "$KNOWS_AMX $*" in "no "*-mamx-tile*) exit 1;; esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo "GLIBC_2.17 GLIBC_2.5" >"$2"; shift; done
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what a wheel is made of, with a library of other sources."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("quantkit", "recipes", "evals/suites", "evals/tasks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    stale = folder / "build/lib/quantkit/kernels/cpu/avx2-stale.so"
    stale.parent.mkdir(parents=True)
    stale.touch()
    return folder


def make(tree, out, kind="wheel", machine="x86_64", **settings):
    """Build in `tree`; return the file, and what was printed."""
    code = f"from setuptools.build_meta import *; print(build_{kind}({str(out)!r}))"
    environment = {**os.environ, "MACHINE": f"{machine}-linux-gnu", **settings}
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1], done.stdout + done.stderr


def libraries(wheel):
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so"))


def expected(*names):
    return sorted(
        str(build.library_file(ROOT / folder, name).relative_to(ROOT)) for folder in FOLDERS for name in names
    )


@pytest.mark.parametrize(
    ("machine", "knows_amx", "names"),
    [
        ("x86_64", "yes", ("amx", "avx512", "avx2")),
        ("x86_64", "no", ("avx512", "avx2")),
        ("aarch64", "yes", ("neon",)),
    ],
)
def test_a_wheel_has_a_library_for_each_instruction_set_that_the_compiler_knows(
    tree, tmp_path, machine, knows_amx, names
):
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    wheel, _ = make(tree, tmp_path, machine=machine, CC=str(compiler), KNOWS_AMX=knows_amx)
    assert wheel.name.endswith(f"-py3-none-manylinux_2_17_{machine}.whl")
    assert libraries(wheel) == expected(*names)


def test_a_compiler_for_another_machine_compiles_nothing(tree, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    wheel, said = make(tree, tmp_path, machine="riscv64", CC=str(compiler))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries(wheel) == []
    assert f"no C kernels: {compiler} compiles for riscv64" in said


def test_a_compiler_that_fails_leaves_no_libraries(tree, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.replace("case", 'case "$*" in *linear.c*) exit 1;; esac\ncase', 1))
    compiler.chmod(0o755)
    wheel, said = make(tree, tmp_path, CC=str(compiler), KNOWS_AMX="yes")
    assert libraries(wheel) == []
    assert f"no C kernels: {compiler} failed" in said


def test_without_a_compiler_the_wheel_has_none_also_if_made_from_the_source_archive(tree, tmp_path):
    settings = {"CC": "", "PATH": str(tmp_path)}
    wheel, said = make(tree, tmp_path, **settings)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries(wheel) == []
    assert "no C kernels: no C compiler; install gcc" in said
    archive, _ = make(tree, tmp_path, "sdist")
    shutil.unpack_archive(archive, tmp_path)
    (tmp_path / "out").mkdir()
    other, _ = make(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "out", **settings)
    assert contents(wheel) == contents(other)


def contents(wheel):
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if not name.endswith("/RECORD")}


def test_an_editable_installation_compiles_nothing(tree, tmp_path):
    wheel, _ = make(tree, tmp_path, "editable", CC="/bin/false")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert list(tree.glob("quantkit/**/*.so")) == []
