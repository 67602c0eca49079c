"""The machine: its tools, its ceilings (copies and large products), and whether every part can be imported."""

from __future__ import annotations

import importlib
import multiprocessing
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from timing import gemm_rate, open_results, parse

HERE = Path(__file__).parent
TOOLS = ("compute-sanitizer", "nvidia-smi", "nvcc", "git")


def programs() -> list[str]:
    """Of all parts."""
    lines = (HERE / "parts.txt").read_text().splitlines()
    return list(dict.fromkeys(line.split()[2].removesuffix(".py") for line in lines if not line.startswith("#")))


def check(program: str) -> dict[str, Any]:
    """Import a part, and what it imports late and names in NEEDS, in a process of its own.

    Raises:
        ImportError: it cannot be imported; the message names the error.
    """
    try:
        for name in getattr(importlib.import_module(program), "NEEDS", ()):
            importlib.import_module(name)
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"
        raise ImportError(why + "; evals/gpu/wheels.sh fetches it" * ("No module named" in why)) from None
    return {"imported": True}


def check_all(names: Iterable[str], pools: ExitStack) -> dict[str, Future[dict[str, Any]]]:
    """Begin to `check` each part; one that ends its process, as a segmentation fault does, fails alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["quantkit.runtime.llm", "transformers"])  # what takes long, once for all
    opened = {name: pools.enter_context(ProcessPoolExecutor(1, mp_context=context)) for name in names}
    return {name: pool.submit(check, name) for name, pool in opened.items()}


def main() -> None:
    """Write machine.json."""
    arguments = parse()
    results = open_results("machine", arguments)
    results.rows = []
    results.add(tools="found", names=", ".join(name for name in TOOLS if shutil.which(name)) or "none")
    results.add(
        copy_terabytes=results.meta["copy_bandwidth"] / 1e12,
        gemm_teraflops=gemm_rate(256 if arguments.tiny else 8192, arguments.device) / 1e12,
        l2_megabytes=results.meta.get("l2_bytes", 0) / 2**20,
    )
    with ExitStack() as pools:
        for program, checked in check_all(programs(), pools).items():
            results.attempt(checked.result, program=program)
    results.finish()


if __name__ == "__main__":
    main()
