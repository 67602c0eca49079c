"""A command in a child: forked from a process that has imported everything, with limits, and with planted defects."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import run_forked

LIMIT_BYTES, LIMIT_FILES = 2 << 30, 256
# What commands import late; children that have it from their parent cost a quarter.
LIBRARIES = (
    *("compressed_tensors", "compressed_tensors.compressors", "compressed_tensors.quantization", "gguf", "tokenizers"),
    *("rich.console", "rich.live", "rich.progress", "rich.table", "pydantic", "transformers.models.auto"),
    *(
        "transformers.models.llama.modeling_llama",
        "transformers.tokenization_utils_tokenizers",
        "xml.etree.ElementTree",
    ),
)
PLANTS = ("bug", "hang", "memory", "canary", "copy", "json", "signal", "link")


def import_all() -> None:
    """What commands import, once for all children."""
    import quantkit

    ours = [module.name for module in pkgutil.walk_packages(quantkit.__path__, "quantkit.")]
    # A compiled kernel library beside a module looks like an extension module, and may be for another CPU.
    ours = [name for name in ours if "-" not in name]
    ours.remove("quantkit.__main__")
    for name in (*LIBRARIES, *ours):
        with contextlib.suppress(ImportError):  # what is not installed here
            importlib.import_module(name)


def run_command(folder: Path, *arguments: str, to: str = "/dev/null", fault: str = "") -> None:
    """A command in a child, as all are; a fault `FILE:N` kills it before that file is written for the n-th time."""

    def work() -> None:
        _enter(folder)
        if fault:
            _kill_at(*fault.split(":"))
        _main(arguments)

    code, _ = run_forked(work, stdout=folder / to, stderr=Path("/dev/null"))
    assert code == (-signal.SIGKILL if fault else 0), f"preparing with {arguments} ended with {code}"


def _kill_at(name: str, moment: str) -> None:
    rename, calls = Path.replace, [0]

    def replace(path: Path, target: Path) -> Path:
        calls[0] += Path(target).name == name
        if calls[0] == int(moment):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    Path.replace = replace  # type: ignore[method-assign]


def supervise(folder: Path, arguments: tuple[str, ...], limit: float, plant: str | None) -> tuple[int | None, int]:
    """Exit code, None after a hang, and the most bytes that were resident."""

    def work() -> None:
        _enter(folder / "work")
        resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT_FILES, LIMIT_FILES))
        if plant:
            _plant(plant)
        _main(arguments)

    outputs = {"stdout": folder / "stdout", "stderr": folder / "stderr"}
    return run_forked(work, **outputs, limit_s=limit, limit_bytes=2 * LIMIT_BYTES)


def _enter(work: Path) -> None:
    os.chdir(work)
    os.environ["HOME"] = os.environ["XDG_CACHE_HOME"] = str(work / "home")


def _main(arguments: tuple[str, ...]) -> None:
    """The command line."""
    from quantkit.cli import main as command_line

    _stand_in(arguments[0])
    command_line(list(arguments))


def _stand_in(command: str) -> None:
    """Measure the machine on little, as that takes long."""
    if command == "bench":
        from quantkit.benchmark import ceilings

        vars(ceilings).update(_BUFFER_BYTES=1 << 20, _GEMM_ROWS=64)


def _plant(name: str) -> None:
    """A defect in front of the first thing that a command computes."""
    from quantkit.cli import _output

    honest = _output.Output.result

    def result(self: Any, data: Any, *shown: Any) -> None:
        if name == "bug":
            raise KeyError("weights")
        if name == "hang":
            time.sleep(3600)
        if name == "memory":
            hoard = b"x" * (LIMIT_BYTES + (1 << 26))
            assert hoard
        if name == "canary":
            Path("thesis.txt").unlink()
        if name == "copy":
            shutil.copyfile("../mine/secret.txt", "out.safetensors")
        if name == "json":
            honest(self, data, *shown)
        if name == "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "link":
            Path("../mine/sub/new.txt").write_text("x")
        honest(self, data, *shown)

    _output.Output.result = result  # type: ignore[method-assign]
