"""How much slower quantkit gets beside other busy processes, in proportion to the share of the cores it is left.

    python evals/checks/busy_neighbour.py [--only quantize,eval] [--rounds 3] [--before FOLDER] [--json FILE]

Commands on the bundled demo model, with as many threads as there are cores, run alone, beside one and two processes
that loop in Python, and beside a torch process with as many threads as there are cores; all at nice 0. `python` is
`quantkit.quantize` in a process that has imported torch before. Each row is the median of the rounds, as JSON.

`fair_s` is the fair wall time, and `ratio` the measured one over it, at most 1.3 as the target. It is the smaller of:

- one thread: its CPU seconds, over the share of a core that each of the neighbour's threads got meanwhile;
- n threads on n cores beside h busy threads: their wall time alone, times (n + h) / n.

So other processes slow down both sides of the ratio. `others` says how many cores they took, the neighbours included;
wall times alone mean something only on a quiet machine, CPU seconds on any.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import Usage, cpu_seconds, run_measured

CORES = len(os.sched_getaffinity(0))
LIMIT_S = 120
# No neighbour outlives this process, however it ends.
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(9999))"
TORCH = f"import torch\na = torch.ones(512, 512)\n{LOOP.replace('sum(range(9999))', 'a @ a')}"
# Name -> code of each process, and how many threads that makes.
NEIGHBOURS = {"none": ([], 0), "one loop": ([LOOP], 1), "two loops": ([LOOP] * 2, 2), "torch loop": ([TORCH], CORES)}
PORT = 18472
PROMPT = "The river rose in the night, and in the morning "


def main() -> None:
    """Measure all commands beside all neighbours, and print a row for each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="quantize,python,eval,generate,serve", help="commands, with commas")
    parser.add_argument("--beside", default=",".join(NEIGHBOURS), help="neighbours, with commas")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", type=Path, help="checkout of an earlier quantkit, which takes turns with this one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--client", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        serve(options.client)
        return
    codes = {"now": "", **({"before": str(options.before.resolve())} if options.before else {})}
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for command in options.only.split(","):
            for measured in measure(command, options.beside.split(","), codes, options.rounds, Path(work)):
                rows.append(measured)
                print(json.dumps(measured), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measure(
    command: str, beside: list[str], codes: dict[str, str], rounds: int, work: Path
) -> Iterator[dict[str, Any]]:
    """Rows of one command: first alone with one thread and with all, then beside each of the neighbours."""
    alone: dict[tuple[str, int], list[Usage]] = {}
    for threads in (1, CORES):
        for code, runs in turns(command, threads, "none", codes, rounds, work).items():
            alone[code, threads] = [usage for usage, _ in runs]
            yield row(code, command, threads, "none", alone[code, threads])
    for name in beside:
        busy = NEIGHBOURS[name][1]
        if not busy:
            continue
        for code, runs in turns(command, CORES, name, codes, rounds, work).items():
            share = statistics.median(share for _, share in runs)
            one, all_of_them = median(alone[code, 1], "cpu_s"), median(alone[code, CORES], "wall_s")
            fair = min(one / share, all_of_them * (CORES + busy) / CORES)
            usages = [usage for usage, _ in runs]
            ratio = median(usages, "wall_s") / fair
            more = {"share": round(share, 2), "fair_s": round(fair, 2), "ratio": round(ratio, 2)}
            yield row(code, command, CORES, name, usages) | more


def turns(
    command: str, threads: int, beside: str, codes: dict[str, str], rounds: int, work: Path
) -> dict[str, list[tuple[Usage, float]]]:
    """What the command took in each round, and the share of a core that a neighbour's thread got, by checkout."""
    runs: dict[str, list[tuple[Usage, float]]] = {code: [] for code in codes}
    for _ in range(rounds):
        for code, path in codes.items():
            words = command_line(command, threads, work)
            environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
            with neighbours(beside) as pids:
                before, started = sum(map(cpu_seconds, pids)), time.monotonic()
                usage = run_measured(words, work / "log", environment=environment, folder=work, limit_s=LIMIT_S)
                share = (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - started)
            if usage.code not in (0, -signal.SIGKILL):
                raise SystemExit(f"{command}: exit code {usage.code}: {usage.said}")
            runs[code].append((usage, share / max(1, NEIGHBOURS[beside][1])))
    return runs


@contextmanager
def neighbours(name: str) -> Iterator[list[int]]:
    """Keep these processes busy while open, each in a session of its own as a stranger's would be; gives their ids."""
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = ([sys.executable, "-c", code] for code in NEIGHBOURS[name][0])
    busy = [subprocess.Popen(command, start_new_session=True, env=own) for command in words]
    time.sleep(2 if TORCH in NEIGHBOURS[name][0] else 0)  # until torch is imported
    try:
        yield [process.pid for process in busy]
    finally:
        for process in busy:
            process.kill()
            process.wait()


def command_line(command: str, threads: int, work: Path) -> list[str]:
    """The words of a command; `serve` is a process that starts a server, asks it and ends it."""
    quantkit, output, count = [sys.executable, "-m", "quantkit"], str(work / "out"), ["--threads", str(threads)]
    if command == "quantize":
        words = ["--recipe", "awq-int4", "--samples", "8", "--no-resume", "--overwrite", "-o", output]
        return [*quantkit, "quantize", *words]
    if command == "python":
        changes = '{"calibration.samples": 8}'
        call = f"quantkit.quantize(None, 'awq-int4', {output!r}, overrides={changes}, resume=False, overwrite=True)"
        return [
            sys.executable,
            "-c",
            f"import torch; torch.ones(999, 999) @ torch.ones(999, 999); import quantkit; {call}",
        ]
    if command == "eval":
        (work / "text.txt").write_text(PROMPT * 100, encoding="utf-8")
        text = ["--text", str(work / "text.txt"), "--window", "256", "--through", "decode"]
        return [*quantkit, "eval", "--suite", "none", *text, *count]
    if command == "generate":
        return [*quantkit, "generate", "--prompt", PROMPT, "--max-tokens", "400", "--ignore-eos", *count]
    return [sys.executable, __file__, "--client", *quantkit, "serve", "--port", str(PORT), *count]


def serve(words: list[str]) -> None:
    """Start a server, have it answer a few requests one after another, and end it."""
    server = subprocess.Popen(words)
    address = f"http://127.0.0.1:{PORT}"
    try:
        end = time.monotonic() + LIMIT_S
        while not is_up(address):
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        for _ in range(4):
            body = json.dumps({"model": "demo", "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}).encode()
            headers = {"Content-Type": "application/json"}
            urllib.request.urlopen(urllib.request.Request(f"{address}/v1/completions", body, headers)).read()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def is_up(address: str) -> bool:
    """Whether the server takes requests."""
    try:
        return bool(urllib.request.urlopen(f"{address}/ready").status == 200)
    except OSError:
        return False


def median(usages: list[Usage], name: str) -> float:
    """Of one figure."""
    return round(float(statistics.median(getattr(usage, name) for usage in usages)), 2)


def row(code: str, command: str, threads: int, beside: str, usages: list[Usage]) -> dict[str, Any]:
    """One row, but for what is fair."""
    others = statistics.median(usage.others_cpu_s / max(usage.wall_s, 0.01) for usage in usages)
    names = {"code": code, "command": command, "threads": threads, "beside": beside}
    return names | {figure: median(usages, figure) for figure in ("wall_s", "cpu_s")} | {"others": round(others, 2)}


if __name__ == "__main__":
    main()
