"""Share of a decode step that is not the kernels', and tokens per second, with and without the decode program.

    python evals/checks/engine_overhead.py MODEL [--threads 1,2] [--batch 1,8,32] [--rounds 40] [--head int8] [-o FILE]

FILE is below evals/results/decode_steps, from which docs/runtime.md is made.

Two engines load MODEL: one runs a decode step as one native call, the other layer by layer. They take turns of five
steps, so a busy neighbour disturbs both. The native call is nothing but kernels; the rest of a step is the engine:
scheduling, inputs, sampling, and, layer by layer, Python between kernels. With one thread the clock is CPU time,
which a neighbour hardly changes; with more it is wall time. Medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import plain, stamp, write_json

from quantkit import LLM, SamplingParams
from quantkit.kernels.cpu.program import Program

PROMPT, TURN, WARM_UP = 64, 5, 10


def main() -> None:
    """Measure and print one line per number of threads and sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--head", choices=["int8", "int4"])
    parser.add_argument("-o", "--output", type=Path, help="file of results")
    options = parser.parse_args()
    rows = []
    llms = {name: load(options, switch) for name, switch in (("program", "1"), ("layers", "0"))}
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        for batch in map(int, options.batch.split(",")):
            row = measure(llms, batch, options.rounds, clock)
            rows.append({"threads": threads, "batch": batch, "clock": "wall" if threads > 1 else "CPU time", **row})
            print(rows[-1], flush=True)
    if options.output:
        name = Path(options.model).resolve().name + (f", head {options.head}" if options.head else "")
        write_json(options.output, {"model": name, "taken": plain(stamp()), "rows": rows})


def load(options: argparse.Namespace, switch: str) -> LLM:
    """Load the model with the decode program on (1) or off (0)."""
    os.environ["QUANTKIT_DECODE_PROGRAM"] = switch
    length = PROMPT + (options.rounds + 4) * TURN + WARM_UP + 40
    return LLM(options.model, threads=1, max_length=length, max_sequences=32, head_dtype=options.head)


def measure(llms: dict[str, LLM], batch: int, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the medians of both engines, measured in turns: milliseconds a step, and shares outside the kernels."""
    native: list[float] = []
    untimed = Program.run

    def timed(self: Program, *arguments: Any) -> None:
        start = clock()
        untimed(self, *arguments)
        native.append(clock() - start)

    running = {name: start_requests(llm, batch) for name, llm in llms.items()}
    steps: dict[str, list[float]] = {name: [] for name in llms}
    Program.run = timed  # type: ignore[method-assign]
    for _ in range(rounds):
        for name, llm in llms.items():
            for _ in range(TURN):
                start = clock()
                llm.engine.step()
                steps[name].append(clock() - start)
    Program.run = untimed  # type: ignore[method-assign]
    for name, llm in llms.items():
        for number in running[name]:
            llm.engine.cancel(number)
    assert len(native) == rounds * TURN, "a step of the program's engine ran layer by layer"
    step, layers, kernels = (statistics.median(one) for one in (steps["program"], steps["layers"], native))
    return {
        "layers_ms": round(1e3 * layers, 3),
        "program_ms": round(1e3 * step, 3),
        "layers_outside": round(1 - kernels / layers, 4),
        "program_outside": round(1 - kernels / step, 4),
    }


def start_requests(llm: LLM, batch: int) -> list[int]:
    """Add requests, run until all decode and return their numbers."""
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    ids = [[5 + (7 * i + 31 * b) % 200 for i in range(PROMPT)] for b in range(batch)]
    numbers = [llm.engine.add(prompt, params) for prompt in ids]
    for _ in range(batch + WARM_UP):
        llm.engine.step()
    return numbers


if __name__ == "__main__":
    main()
