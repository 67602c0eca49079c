"""compute-sanitizer over a handful of kernel tests: memory that is not a kernel's, and races in shared memory.

Everything runs many times slower under it, so only few tests are run; a tool that is stopped by the time says so.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from results import Absent
from timing import open_results, parse

ROOT = Path(__file__).resolve().parents[2]
TESTS = "test_gated or (test_linears and 256 and float16 and int4) or (test_norms and 1000 and float16)"
SHARE = {"memcheck": 0.55, "racecheck": 0.4}
LEAST_SECONDS = 200
# In a short call: two kernels, one tool.
SHORT = (
    "test_norms[64-torch.float16]",
    "test_linears[('int4', 128, True, None)-(256, 512)-torch.bfloat16]",
)


def check(tool: str, seconds: float, device: str, tests: Sequence[str] = ()) -> dict[str, Any]:
    """Errors that a tool finds."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None or device != "cuda":
        raise Absent("compute-sanitizer is not on this machine" if program is None else "needs a CUDA device")
    command = [program, "--tool", tool, "--target-processes", "application-only", sys.executable, "-m", "pytest"]
    command += ["-o", "addopts=", "-o", "required_plugins=", "-q", "-x", "-p", "no:cacheprovider"]
    file = "tests/kernels/gpu/test_on_gpu.py"
    command += [f"{file}::{test}" for test in tests] if tests else ["-k", TESTS, file]
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


def main() -> None:
    """Write sanitizer.json."""
    arguments = parse(250, short="two kernels, and only their memory")
    results = open_results("sanitizer", arguments, row_seconds=arguments.seconds, share=1.0)
    if arguments.short:
        work = partial(check, "memcheck", 0.9 * arguments.seconds, arguments.device, SHORT)
        results.attempt(work, kind="compute-sanitizer memcheck, two kernels")
        results.finish(is_wrong=any(row.get("errors") for row in results.rows))
    if arguments.seconds < LEAST_SECONDS:  # half a check is none
        print(f"left to a call with {LEAST_SECONDS} s for it", flush=True)
        results.is_unfinished = True
        results.finish()
    for tool, share in SHARE.items():
        work = partial(check, tool, share * arguments.seconds, arguments.device)
        results.attempt(work, kind=f"compute-sanitizer {tool}")
    results.finish(is_wrong=any(row.get("errors") for row in results.rows))


if __name__ == "__main__":
    main()
