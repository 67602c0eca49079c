"""compute-sanitizer over the tests of two kernels: memory that is not a kernel's.

Everything runs many times slower under it, so only few tests are run; where the time stops it, the row says so.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from results import Absent
from timing import open_results, parse

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/kernels/gpu/test_on_gpu.py::test_norms[64-torch.float16]",
    "tests/kernels/gpu/test_on_gpu.py::test_linears[('int4', 128, True, None)-(256, 512)-torch.bfloat16]",
)


def check(seconds: float, device: str) -> dict[str, Any]:
    """Errors that it finds."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None or device != "cuda":
        raise Absent("compute-sanitizer is not on this machine" if program is None else "needs a CUDA device")
    command = [program, "--tool", "memcheck", "--target-processes", "application-only", sys.executable, "-m", "pytest"]
    command += ["-o", "addopts=", "-o", "required_plugins=", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"not done after {seconds:.0f} s") from error
    said = done.stdout + done.stderr
    summary = re.findall(r"ERROR SUMMARY: (\d+)", said)
    if not summary:
        raise RuntimeError(said.strip().splitlines()[-1] if said.strip() else "it said nothing")
    passed = re.search(r"(\d+) passed", said)
    return {"errors": int(summary[-1]), "tests_passed": int(passed[1]) if passed else 0}


def main() -> None:
    """Write sanitizer.json."""
    arguments = parse(45)
    results = open_results("sanitizer", arguments, row_seconds=arguments.seconds, share=1.0)
    work = partial(check, 0.9 * arguments.seconds, arguments.device)
    results.attempt(work, kind="compute-sanitizer memcheck, two kernels")
    results.finish(is_wrong=any(row.get("errors") for row in results.rows))


if __name__ == "__main__":
    main()
