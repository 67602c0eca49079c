"""compute-sanitizer over a handful of kernel tests: memory that is not a kernel's, and races in shared memory.

Everything runs many times slower under it, so only few tests are run; a tool that is stopped by the time says so.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from timing import Absent, Results, parse

ROOT = Path(__file__).resolve().parents[2]
TESTS = "test_gated or (test_linears and 256 and float16 and int4) or (test_norms and 1000 and float16)"
SHARE = {"memcheck": 0.6, "racecheck": 0.4}


def check(tool: str, seconds: float, device: str) -> dict[str, Any]:
    """Errors that a tool finds."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None or device != "cuda":
        raise Absent("compute-sanitizer is not on this machine" if program is None else "needs a CUDA device")
    command = [program, "--tool", tool, "--target-processes", "application-only", sys.executable, "-m", "pytest"]
    command += ["-o", "addopts=", "-o", "required_plugins=", "-q", "-x", "-p", "no:cacheprovider", "-k", TESTS]
    command += ["tests/kernels/gpu/test_on_gpu.py"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"not done after {seconds:.0f} s") from error
    said = done.stdout + done.stderr
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", said)
    if not summary:
        raise RuntimeError(said.strip().splitlines()[-1] if said.strip() else "it said nothing")
    tests = re.search(r"(\d+) passed", said)
    return {"errors": int(summary[-1]), "tests_passed": int(tests[1]) if tests else 0}


def main() -> int:
    """Write sanitizer.json; 1 if something was found."""
    arguments = parse(20)
    results = Results("sanitizer", arguments)
    wrong = 0
    for tool, share in SHARE.items():
        kind = f"compute-sanitizer {tool}"
        outcome = results.attempt(lambda tool=tool, share=share: _check(tool, share, arguments), kind=kind)
        wrong += 0 if outcome is None else outcome["errors"]
    results.save()
    return int(wrong > 0)


def _check(tool: str, share: float, arguments: Any) -> dict[str, Any]:
    return check(tool, max(5.0, share * arguments.seconds), arguments.device)


if __name__ == "__main__":
    sys.exit(main())
