"""What the HTTP door costs: the same requests to the engine in process and through `quantkit serve`, in one run.

    python evals/checks/server_cost.py [MODEL ...] [--streams 1,8,32] [--rounds 3] [--out FILE]

Without MODEL: the demo model, where the engine is fastest and the door weighs most, and random weights of 8 layers of
TinyLlama-1.1B's shape. In turns for each number of streams, the same random prompts of 64 tokens, 64 new ones each. The
engine computes with one thread on one core of its own, in process as in the server; the server's event loop and the
client have the other cores, so that nobody takes time from the engine but through the door. Prints one JSON object and
writes it to FILE: rates, medians, CPU per token of the whole server and of its event loop.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))
import launch
from make_random_llama import make
from record import about, save

TOKENS = 64  # of a prompt and of an answer
Figures = dict[str, float]


class Cores:
    """Which cores the engine has, and which the rest: one and the others; the same where there is only one."""

    def __init__(self) -> None:
        first, *others = sorted(os.sched_getaffinity(0))
        self.engine, self.door = {first}, set(others) or {first}

    def divide(self, process: int) -> None:
        """Give a server's event loop, its main thread, the door's cores, and its other threads the engine's."""
        for task in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(task.name), self.door if int(task.name) == process else self.engine)


def cpu_seconds(process: int, thread: int | None = None) -> float:
    """Of a process so far, its threads included, or of one of them."""
    folder = f"/proc/{process}" if thread is None else f"/proc/{process}/task/{thread}"
    fields = Path(folder, "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summarize(run: Any, spent: float, loop: float = 0.0) -> Figures:
    """Rates and medians of a BenchmarkRun, and CPU per token.

    Args:
        run: what was measured.
        spent, loop: seconds of CPU: all, and of the event loop.
    """
    count = sum(timing.num_new_tokens for timing in run.requests)
    return {
        "requests_per_s": run.requests_per_s,
        "tokens_per_s": run.output_tokens_per_s,
        "ttft_ms": 1e3 * median(run.ttft_s),
        "itl_ms": 1e3 * median(run.inter_token_s),
        "cpu_us_per_token": 1e6 * spent / count,
        "loop_us_per_token": 1e6 * loop / count,
    }


def measure_model(model: str | None, shown: str, streams: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each number of streams."""
    from quantkit.benchmark.http import measure_server
    from quantkit.benchmark.latency import run_load
    from quantkit.benchmark.options import BenchmarkOptions
    from quantkit.benchmark.workload import closed_loop, make_load
    from quantkit.remote import Remote
    from quantkit.runtime.llm import LLM

    cores, sizes = Cores(), {"prompt_tokens": TOKENS, "new_tokens": TOKENS}
    os.sched_setaffinity(0, cores.engine)
    llm = LLM(model, max_sequences=max(streams), prefix_cache=False, threads=1)
    vocabulary: dict[str, Any] = {"vocab_size": llm.model.vocab_size, "avoid": tuple(llm.model.eos_ids)}

    def inside(number: int, count: int, turn: int) -> Figures:
        os.sched_setaffinity(0, cores.engine)
        load = make_load(closed_loop(number, num_requests=count, seed=turn, **sizes), **vocabulary)
        began = time.process_time()
        run = run_load(llm.engine, load)
        return summarize(run, time.process_time() - began)

    def through(server: launch.Server, number: int, count: int, turn: int) -> Figures:
        os.sched_setaffinity(0, cores.door)
        process = server.process.pid
        cores.divide(process)
        asked = BenchmarkOptions(concurrencies=(number,), num_requests=count, seed=turn, **sizes)
        began, loop = cpu_seconds(process), cpu_seconds(process, process)
        run = measure_server(Remote(server.url), asked, **vocabulary)[0]
        return summarize(run, cpu_seconds(process) - began, cpu_seconds(process, process) - loop)

    rows = []
    with launch.quantkit(model, ["--max-running", str(max(streams)), "--threads", "1"]) as server:
        for number in streams:
            count = max(8 if model is None else 4, 2 * number)
            kept: dict[str, list[Figures]] = {"in process": [], "server": []}
            for turn in range(rounds):
                ways = [("in process", inside), ("server", lambda *sizes: through(server, *sizes))]
                for name, way in ways if turn % 2 == 0 else reversed(ways):
                    kept[name].append(way(number, count, turn))
            medians = {n: {key: median(e[key] for e in several) for key in several[0]} for n, several in kept.items()}
            rows.append({"model": shown, "streams": number, **medians})
            print(shown, number, json.dumps(medians), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    origin = about(prompt_tokens=TOKENS, new_tokens=TOKENS, threads=1)
    streams = [int(part) for part in options.streams.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if not options.models:
            make(Path(folder), "1b-8layers")
        named = [(model, Path(model).name) for model in options.models] or [(None, "demo"), (folder, "1b-8layers")]
        rows = [row for model, shown in named for row in measure_model(model, shown, streams, options.rounds)]
    data = {"about": origin, "rows": rows}
    print(json.dumps(data, indent=1))
    if options.out is not None:
        save(options.out, data)


if __name__ == "__main__":
    main()
