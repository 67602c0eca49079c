"""Whether every part can be imported here, with what it imports late: a row for each, in the first seconds of a run."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from timing import open_results, parse

HERE = Path(__file__).parent
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
    """Write imports.json."""
    results = open_results("imports", parse())
    results.rows = []
    with ThreadPoolExecutor() as pool:
        checks = {program: pool.submit(check, program) for program in programs()}
        for program, checked in checks.items():
            results.attempt(checked.result, program=program)
    results.finish()


if __name__ == "__main__":
    main()
