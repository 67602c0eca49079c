"""`quantkit`; each rank writes down its memory and how long it was in collectives and at answers, waiting included.

python evals/scale/worker.py FOLDER quantize ... --nproc 2
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit import distributed
from quantkit.cli import main
from quantkit.distributed import collectives

TALKED = {"collectives_s": 0.0, "calls": 0}
ANSWERED = {"answering_s": 0.0, "answers": 0}


@contextmanager
def timed() -> Iterator[None]:
    """In place of what is around each collective."""
    started = time.perf_counter()
    yield
    TALKED["collectives_s"] += time.perf_counter() - started
    TALKED["calls"] += 1


def answered(items: Any, compute: Callable[[Any], Any], **how: Any) -> list[Any]:
    """In place of `share_out` where models answer: each result is a list, of a batch's items or windows."""
    started = time.perf_counter()
    results = collectives.share_out(items, compute, **how)
    ANSWERED["answering_s"] += time.perf_counter() - started
    ANSWERED["answers"] += sum(map(len, results))
    return results


def write(file: Path) -> None:
    """At exit, whatever the exit code."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    told = {**TALKED, **ANSWERED, "peak_mb": peak, "cpu_s": time.process_time()}
    file.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    folder, sys.argv = sys.argv[1], [sys.argv[0], *sys.argv[2:]]
    if "--nproc" in sys.argv and not distributed.is_launched():
        command, launch = [sys.executable, __file__, folder, *sys.argv[1:]], distributed.launch
        distributed.launch = lambda nproc, _: launch(nproc, command)
    else:
        atexit.register(write, Path(folder) / f"rank{os.environ.get('RANK', '0')}.json")
        collectives.lost_contact = timed
        if sys.argv[1] == "verify":
            from quantkit.evaluate import fidelity, shares

            fidelity.share_out = shares.share_out = answered
    main(sys.argv[1:])
