"""What two processes of one thread each do at once, to what one does alone: no two ranks can gain more on this machine.

    python evals/scale/two_processes.py   # on a machine that does no more; into evals/results/scale/two_processes.json

Products, products added to a large matrix as in a Gram matrix, element-wise work, and memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import stamp

FILE = Path(__file__).resolve().parents[1] / "results/scale/two_processes.json"
SECONDS = 3.0


def rates() -> dict[str, float]:
    """Operations, or bytes, in units of 10^9 per second, of this process."""
    import torch

    torch.set_num_threads(1)
    left, right, rows = torch.randn(1024, 2048), torch.randn(2048, 5632), torch.randn(1024, 5632)
    total, large, scale = torch.zeros(5632, 5632), torch.randn(64 << 20), torch.randn(2048)
    weights = torch.randn(5632, 2048)[:200]
    return {
        "products": rate(lambda: left @ right, 2 * 1024 * 2048 * 5632),
        "sums of products": rate(lambda: total[:512].addmm_(rows[:, :512].T, rows), 2 * 1024 * 512 * 5632),
        "element-wise": rate(lambda: [torch.round(row * scale).clamp_(-8, 7) for row in weights], 3 * weights.numel()),
        "memory": rate(lambda: large.mul_(1.0001), 2 * large.nbytes),
    }


def rate(work: Callable[[], object], amount: int) -> float:
    """Of work that is so much."""
    work()
    started, count = time.monotonic(), 0
    while (taken := time.monotonic() - started) < SECONDS:
        work()
        count += 1
    return round(count * amount / taken / 1e9, 2)


def at_once(count: int) -> list[dict[str, float]]:
    """Rates of so many processes."""
    started = [subprocess.Popen([sys.executable, __file__, "--one"], stdout=subprocess.PIPE) for _ in range(count)]
    return [json.loads(process.communicate()[0]) for process in started]


if __name__ == "__main__":
    if sys.argv[1:] == ["--one"]:
        print(json.dumps(rates()))
    else:
        FILE.write_text(json.dumps({"one": at_once(1), "two": at_once(2), "taken": asdict(stamp())}, indent=1) + "\n")
