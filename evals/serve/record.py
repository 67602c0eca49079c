"""What a result says about where it comes from, and where it is kept: evals/results/serve/NAME.json."""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from provenance import commit, version

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "evals" / "results" / "serve"
PACKAGES = ("quantkit", "torch", "transformers", "starlette", "uvicorn", "aiohttp")


def about(**further: Any) -> dict[str, Any]:
    """Commit, versions and machine, and how busy others keep it: figures of a busy machine are no claims."""
    from quantkit.machine.devices import processor_name

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "processor": processor_name() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "busy_before": round(_busy_share(), 2),
        **further,
    }


def _busy_share() -> float:
    """Of the processors' time, while this process sleeps."""

    def read() -> tuple[int, int]:
        times = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return times[3] + times[4], sum(times)  # idle and waiting for disks; all

    idle, total = read()
    time.sleep(1.0)
    idle_after, total_after = read()
    return 1 - (idle_after - idle) / max(1, total_after - total)
