"""What the HTTP door costs: the same requests to the engine in process and through `quantkit serve`, in one run.

    python evals/checks/server_cost.py [MODEL] [--streams 1,8,32] [--rounds 3] [--url NAME=URL ...]

In turns for each number of streams: the engine in process, our server, and any further servers that are running
already (`--url vllm=http://...`). All get the same random prompts of 64 tokens and make 64. Prints one JSON object:
requests and tokens per second, TTFT and ITL medians, ratios, and the CPU time that the door takes per token (CPU
seconds of the server's process less those of this process while it drove the engine itself).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

SIZES = {"prompt_tokens": 64, "new_tokens": 64}


def cpu_seconds(pid: int) -> float:
    """Of a process so far, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summarize(run) -> dict[str, float]:  # noqa: ANN001 - a BenchmarkRun, imported late
    """Rates and medians of a run."""
    return {
        "requests_per_s": run.requests_per_s,
        "tokens_per_s": run.output_tokens_per_s,
        "ttft_s": statistics.median(run.ttft_s),
        "itl_s": statistics.median(run.inter_token_s),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL")
    options = parser.parse_args()

    from quantkit.benchmark.http import measure_server
    from quantkit.benchmark.latency import run_load
    from quantkit.benchmark.options import BenchmarkOptions
    from quantkit.benchmark.workload import closed_loop, make_load
    from quantkit.remote import Remote
    from quantkit.runtime.llm import LLM

    streams = [int(part) for part in options.streams.split(",")]
    llm = LLM(options.model, max_sequences=max(32, *streams), prefix_cache=False, threads=options.threads)
    vocabulary = {"vocab_size": llm.model.vocab_size, "avoid": tuple(llm.model.eos_ids)}
    command = [sys.executable, "-m", "quantkit", "serve", *([options.model] if options.model else []), "--port", "0"]
    limits = ["--max-running", str(max(32, *streams)), "--threads", str(options.threads)]
    with subprocess.Popen([*command, *limits], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = re.search(r"http://\S+:\d+", server.stderr.readline())
        assert found is not None
        doors = {"ours": found.group(), **dict(pair.split("=", 1) for pair in options.url)}
        rows: dict[str, dict[str, list[dict[str, float]]]] = {}
        for number in streams:
            load = closed_loop(number, num_requests=max(8, 3 * number), **SIZES)
            asked = BenchmarkOptions(concurrencies=(number,), num_requests=load.num_requests, **SIZES)
            row = rows[str(number)] = {name: [] for name in ("in process", *doors)}
            for turn in range(options.rounds):
                order = ["in process", *doors]
                for name in order if turn % 2 == 0 else reversed(order):
                    if name == "in process":
                        began = time.process_time()
                        run = run_load(llm.engine, make_load(load, **vocabulary, turn=turn))
                        spent = time.process_time() - began
                    else:
                        began = cpu_seconds(server.pid)
                        run = measure_server(Remote(doors[name]), asked, **vocabulary)[0]
                        spent = cpu_seconds(server.pid) - began
                    count = sum(timing.num_new_tokens for timing in run.requests)
                    row[name].append({**summarize(run), "cpu_s_per_token": spent / count if name != "vllm" else 0.0})
        server.terminate()
    medians = {
        number: {
            name: {key: statistics.median(entry[key] for entry in entries) for key in entries[0]}
            for name, entries in row.items()
        }
        for number, row in rows.items()
    }
    for row in medians.values():
        inside, ours = row["in process"], row["ours"]
        row["ours / in process"] = {key: ours[key] / inside[key] for key in inside}
        row["door"] = {
            "cpu_s_per_token": ours["cpu_s_per_token"] - inside["cpu_s_per_token"],
            "ttft_s": ours["ttft_s"] - inside["ttft_s"],
        }
    print(json.dumps({"model": options.model or "demo", "threads": options.threads, "streams": medians}, indent=1))


if __name__ == "__main__":
    main()
