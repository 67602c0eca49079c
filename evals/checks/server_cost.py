"""What the HTTP door costs: the same requests to the engine in process and through `quantkit serve`, in one run.

    python evals/checks/server_cost.py [MODEL ...] [--streams 1,8,32] [--rounds 3] [--out FILE]

Without MODEL: the demo model, where the engine is fastest and the door weighs most, and random weights of 8 layers of
TinyLlama-1.1B's shape. In turns for each number of streams, the same random prompts of 64 tokens, 64 new ones each, in
closed loops of three kinds:

    in process       what is sent on the news of a step is part of the next one
    behind a step    in process too, but it comes when the next step has begun, as it does from any client elsewhere
    server           through HTTP

In the others a request that comes to a busy engine waits for the step under way as well, whatever the door costs; so
TTFT is compared with the second. What of it is the door's own: TTFT of the client less that of the server, means.

The engine computes with one thread on one core of its own, in process as in the server; the server's event loop and the
client have the other cores, so that nobody takes time from the engine but through the door. Prints one JSON object and
writes it to FILE: rates, medians, CPU per token of the whole server, of its event loop, and of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections import deque
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))
import launch
from clients import TOKENS, Figures, figures
from make_random_llama import make
from processes import cpu_seconds
from provenance import write_json
from record import about


class Cores:
    """Which cores the engine has, and which the rest: one and the others; the same where there is only one."""

    def __init__(self) -> None:
        first, *others = sorted(os.sched_getaffinity(0))
        self.engine, self.door = {first}, set(others) or {first}

    def divide(self, process: int) -> None:
        """Give a server's event loop, its main thread, the door's cores, and its other threads the engine's."""
        for task in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(task.name), self.door if int(task.name) == process else self.engine)


def first_token_seconds(server: launch.Server) -> float:
    """Of all requests so far together, as the server itself counts."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return float(re.search(r"^quantkit_time_to_first_token_seconds_sum (\S+)$", text, re.M)[1])


def summarize(run: Any, **seconds: float) -> Figures:
    """Rates and medians of a BenchmarkRun, and CPU per token of each of the given by name."""
    count = sum(timing.num_new_tokens for timing in run.requests)
    spent = {f"{name}_us_per_token": 1e6 * each / count for name, each in seconds.items()}
    return {**figures(run), "itl_ms": 1e3 * median(run.inter_token_s), **spent}


def run_behind_a_step(engine: Any, load: Any) -> Any:
    """`run_load` with clients elsewhere: what they send on the news of a step comes when the next one has begun."""
    from quantkit.benchmark.workload import Driver
    from quantkit.results import BenchmarkRun

    driver, requests = Driver(engine), deque(zip(load.prompts, load.new_tokens, strict=True))
    while requests or driver.num_under_way:
        sent, now = min(load.workload.concurrency - driver.num_under_way, len(requests)), driver.clock()
        if driver.num_under_way:
            driver.step()
        for _ in range(sent):
            driver.send(*requests.popleft(), arrived_s=now)
    return BenchmarkRun(workload=load.workload, requests=tuple(driver.finished))


def measure_model(model: str | None, shown: str, streams: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each number of streams."""
    from quantkit.benchmark import http
    from quantkit.benchmark.workload import Load, closed_loop, make_load, run_load
    from quantkit.runtime.llm import LLM
    from quantkit.server.client import Remote

    cores, sizes = Cores(), {"prompt_tokens": TOKENS, "new_tokens": TOKENS, "num_warmup": 0}
    os.sched_setaffinity(0, cores.engine)
    llm = LLM(model, max_sequences=max(streams), threads=1)
    vocabulary: dict[str, Any] = {"vocab_size": llm.model.vocab_size, "avoid": tuple(llm.model.eos_ids)}

    def inside(load: Load, loop: Any) -> Figures:
        os.sched_setaffinity(0, cores.engine)
        began = time.process_time()
        run = loop(llm.engine, load)
        return summarize(run, cpu=time.process_time() - began)

    async def send(server: launch.Server, load: Load) -> Any:
        async with Remote(server.url) as remote:
            return await http.run_load(remote, load)

    def through(server: launch.Server, load: Load) -> Figures:
        os.sched_setaffinity(0, cores.door)
        process = server.process.pid
        cores.divide(process)
        waited, client = first_token_seconds(server), time.process_time()
        began, loop = cpu_seconds(process), cpu_seconds(process, process)
        run = asyncio.run(send(server, load))
        spent = {"cpu": cpu_seconds(process) - began, "loop": cpu_seconds(process, process) - loop}
        figures = summarize(run, **spent, client=time.process_time() - client)
        own = (first_token_seconds(server) - waited) / len(run.requests)
        return {**figures, "door_ttft_ms": 1e3 * (mean(run.ttft_s) - own)}

    rows = []
    with launch.quantkit(model, ["--max-running", str(max(streams)), "--threads", "1"]) as server:
        ways = {
            "in process": lambda load: inside(load, run_load),
            "behind a step": lambda load: inside(load, run_behind_a_step),
            "server": lambda load: through(server, load),
        }
        for number in streams:
            kept: dict[str, list[Figures]] = {name: [] for name in ways}
            # The first turn is a short one that warms up.
            for turn in range(rounds + 1):
                count = number if turn == 0 else max(16, 8 * number) if model is None else max(4, 2 * number)
                asked = closed_loop(number, num_requests=count, seed=turn, **sizes)
                for place, name in list(enumerate(ways))[:: 1 if turn % 2 else -1]:
                    # Other prompts for each: what one has computed, the next would find in the cache.
                    kept[name].append(ways[name](make_load(asked, **vocabulary, turn=place)))
            medians = {
                n: {key: median(e[key] for e in several[1:]) for key in several[0]} for n, several in kept.items()
            }
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
        write_json(options.out, data)


if __name__ == "__main__":
    main()
