"""The check that a user's first load makes of the GPU kernels: that they pass it here, and how long it takes.

Other parts force the kernels; this one lets the engine decide, once without verdicts and once with those of the first.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch
from results import Absent
from timing import open_results, parse

from quantkit.demo import DEMO_MODEL
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.first_run import check_kernels, read_verdicts, verdict_file

# Limits that the engine promises, in seconds.
MOST_SECONDS = {"first load": 15.0, "second load": 2.0}


def check(device: torch.device, load: str) -> dict[str, Any]:
    """What a load with quantized pages and a packed head finds."""
    if device.type != "cuda":
        raise Absent("needs a CUDA device")
    os.environ.pop("QUANTKIT_TRITON", None)
    if load == "first load":
        verdict_file(device).unlink(missing_ok=True)
    begun = time.perf_counter()
    check_kernels(DEMO_MODEL, EngineConfig(dtype="bfloat16", kv_cache="int4", head_dtype="int4"), device)
    seconds, verdicts = time.perf_counter() - begun, read_verdicts(device)
    failed = {key: verdict.text for key, verdict in verdicts.items() if not verdict.passed}
    return {"seconds": seconds, "checks": len(verdicts), "failed": failed, "in_time": seconds <= MOST_SECONDS[load]}


def main() -> None:
    """Write first_run.json."""
    arguments = parse(60)
    results = open_results("first_run", arguments)
    for load in MOST_SECONDS:
        results.attempt(partial(check, torch.device(arguments.device), load), kind=load)
    results.finish(is_wrong=any(row.get("failed") for row in results.rows))


if __name__ == "__main__":
    main()
