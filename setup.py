"""Compile the C kernels into wheels, once per instruction set; pyproject.toml has everything else.

A library depends neither on the Python version nor on the CPU of the build machine, and quantkit chooses one when it
runs. Editable installations get none, because a checkout compiles its library at first use: quantkit/native/build.py.
"""

import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from quantkit.native import build


class BuildWithLibraries(build_py):
    """Copy Python and C files, then compile the C files beside their copies.

    The compiler may be one for another machine: `CC=aarch64-linux-gnu-gcc python -m build`.
    """

    machine = platform.machine()

    def run(self) -> None:
        """Copy and compile. Without a compiler, warn: quantkit then computes with torch."""
        super().run()
        if self.editable_mode:
            return
        for stale in libraries(self.build_lib):
            stale.unlink()
        if sys.platform != "linux":
            self.warn(f"the C kernels are for Linux; on {platform.system()}, torch computes in their place")
            return
        folders = sorted({path.parent for path in Path(self.build_lib).rglob("*.c")})
        try:
            compiler = build.find_compiler()
            self.machine = build.machine_of(compiler)
            if self.machine not in build.OF_MACHINES:
                self.warn(f"no C kernels: {compiler} compiles for {self.machine}. torch computes in their place")
                return
            names = [name for name in build.OF_MACHINES[self.machine] if build.knows(compiler, name)]
            with ThreadPoolExecutor() as pool:
                jobs = [(folder, name) for name in names for folder in folders]
                list(pool.map(lambda job: build.compile_folder(compiler, *job), jobs))
        except build.BuildError as error:
            for one_of_some in libraries(self.build_lib):
                one_of_some.unlink()
            self.warn(f"no C kernels: {error}. torch computes in their place, more slowly")


class WheelOfAnyPython(bdist_wheel):
    """A wheel for every Python 3 and, if it has libraries, for the oldest glibc that they can be loaded with."""

    def run(self) -> None:
        """Build, then pack; a wheel without libraries is for any platform."""
        self.run_command("build")
        if libraries(self.get_finalized_command("build_py").build_lib):
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # the command `install` asks this
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags for Python, ABI and platform."""
        if self.root_is_pure:
            return super().get_tag()
        compiled = self.get_finalized_command("build_py")
        found = libraries(compiled.build_lib)
        minors = [int(minor) for file in found for minor in re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes())]
        return "py3", "none", f"{f'manylinux_2_{max(minors)}' if minors else 'linux'}_{compiled.machine}"


def libraries(folder: str) -> list[Path]:
    """Return all libraries below a folder."""
    return sorted(Path(folder).rglob("*.so"))


setup(cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelOfAnyPython})
