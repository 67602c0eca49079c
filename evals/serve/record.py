"""The origin that every result states, and the folder of the results: evals/results/serve/NAME.json."""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from processes import busy_seconds
from provenance import commit, version

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "evals" / "results" / "serve"
PACKAGES = ("quantkit", "torch", "transformers", "starlette", "uvicorn", "aiohttp")


def about(**further: Any) -> dict[str, Any]:
    """Return commit, versions, machine, and how busy others keep it: figures of a busy machine are unreliable."""
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
    """Return the share of the processors' time that other processes use while this process sleeps for a second."""
    before = busy_seconds()
    time.sleep(1.0)
    return (busy_seconds() - before) / (os.cpu_count() or 1)
