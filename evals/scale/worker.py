"""One rank of `quantkit`, which writes down how long it was in collectives, waiting included, and its largest memory.

torchrun --standalone --nproc-per-node 2 evals/scale/worker.py FOLDER quantize ...
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.cli import main
from quantkit.distributed import collectives

TALKED = {"collectives_s": 0.0, "calls": 0}


@contextmanager
def timed() -> Iterator[None]:
    """In place of what is around each collective."""
    started = time.perf_counter()
    yield
    TALKED["collectives_s"] += time.perf_counter() - started
    TALKED["calls"] += 1


def write(file: Path) -> None:
    """At exit, whatever the exit code."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    told = {**TALKED, "peak_mb": peak, "cpu_s": time.process_time()}
    file.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    atexit.register(write, Path(sys.argv[1]) / f"rank{os.environ.get('RANK', '0')}.json")
    collectives._mourned = timed
    main(sys.argv[2:])
