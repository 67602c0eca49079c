"""The same 32 requests of mixed lengths through continuous batching and in static batches of 8, in one run.

    python evals/checks/continuous_batching.py [MODEL] [--requests 32] [--longest 200] [--rounds 3]

Two kinds of static batches: "padded" computes every row until the longest of its batch has ended, as engines without
iteration-level scheduling do; "early exit" drops a row that has ended but admits nobody before the whole batch has.
The three take turns; medians of wall and process CPU seconds are shown. MODEL is a directory; without it, the demo.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from quantkit.demo import DEMO_MODEL
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.assembly import build_engine
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import SamplingParams

Request = tuple[list[int], int]
STATIC = 8


def main() -> None:
    """Measure in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=DEMO_MODEL)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--longest", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = load_model(options.model)
    draw = random.Random(0)

    def length() -> int:
        return round(4 * (options.longest / 4) ** draw.random())  # as many short ones as long ones, by magnitude

    requests = [([5 + draw.randrange(200) for _ in range(length())], length()) for _ in range(options.requests)]

    def engine(sequences: int) -> Engine:
        config = EngineConfig(max_sequences=sequences, max_length=2 * options.longest, prefix_cache=False)
        return build_engine(model, config)

    batches = [requests[at : at + STATIC] for at in range(0, len(requests), STATIC)]

    ways: dict[str, Callable[[], int]] = {
        "continuous": lambda: serve(engine(options.requests), requests),
        "static, early exit": lambda: sum(serve(engine(STATIC), batch) for batch in batches),
        "static, padded": lambda: sum(serve(engine(STATIC), padded(batch)) for batch in batches),
    }
    seconds: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, run in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            steps = run()
            seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu, steps))
    base = [statistics.median(row[column] for row in seconds["continuous"]) for column in (0, 1)]
    for name, rows in seconds.items():
        found = [statistics.median(row[column] for row in rows) for column in (0, 1)]
        print(
            f"{name:20} {found[0]:7.2f} s wall  {found[1]:7.2f} s CPU  {rows[0][2]:5} steps  "
            f"x{found[0] / base[0]:.2f} wall  x{found[1] / base[1]:.2f} CPU"
        )


def padded(batch: list[Request]) -> list[Request]:
    """Every request as long as the longest: what a static batch computes."""
    longest = max(new for _, new in batch)
    return [(prompt, longest) for prompt, _ in batch]


def serve(engine: Engine, requests: list[Request]) -> int:
    """Run requests to their end; how many steps it took."""
    for prompt, new in requests:
        engine.add(prompt, SamplingParams(max_tokens=new, ignore_eos=True))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    return steps


if __name__ == "__main__":
    main()
