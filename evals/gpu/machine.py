"""The machine: its tools, its ceilings (copies and large products), and whether every part can be imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from timing import gemm_rate, open_results, parse

HERE = Path(__file__).parent
TOOLS = ("compute-sanitizer", "nvidia-smi", "nvcc", "git")


# What a part imports late it names in NEEDS.
CHECK = """
import importlib, sys
for name in getattr(importlib.import_module(sys.argv[1]), "NEEDS", ()):
    importlib.import_module(name)
"""


def programs() -> list[str]:
    """Of all parts."""
    lines = (HERE / "parts.txt").read_text().splitlines()
    return list(dict.fromkeys(line.split()[2].removesuffix(".py") for line in lines if not line.startswith("#")))


def check(program: str) -> dict[str, Any]:
    """Import a part in a process of its own.

    Raises:
        ImportError: it cannot be; the message is the last line of what Python says.
    """
    done = subprocess.run([sys.executable, "-c", CHECK, program], capture_output=True, text=True, cwd=HERE, check=False)
    if done.returncode:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ImportError(why + "; evals/gpu/wheels.sh fetches it" * ("No module named" in why))
    return {"imported": True}


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
    with ThreadPoolExecutor() as pool:
        checks = {program: pool.submit(check, program) for program in programs()}
        for program, checked in checks.items():
            results.attempt(checked.result, program=program)
    results.finish()


if __name__ == "__main__":
    main()
