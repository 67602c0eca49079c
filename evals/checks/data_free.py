"""Time, CPU time and memory of a recipe without data, of this quantkit and of another one, in turns.

    python evals/checks/data_free.py --other OLD/bin/python [--recipe rtn-int4] [--layers 28] [--pairs 3] [--model DIR]

Writes a random Llama of the shape of a 3B (28 layers are 6 GB in bfloat16) unless a model is given, quantizes it with
both in pairs whose order alternates, and prints each run, the ratio of the medians and whether all shards are equal.
Wall time is what a user waits for, on a machine that does nothing else; user and system seconds say more on one that is
shared. Peak memory is held against a GiB above two of the model's largest linears. Exit code 1: a ratio of wall times
above 0.5, another memory, or other bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import make_random_llama

GOAL, ROOM_BYTES = 0.5, 1 << 30


@dataclass(frozen=True)
class Run:
    """One compression: seconds on the clock and of processors, resident bytes at their highest, digests of shards."""

    wall: float
    cpu: float
    peak: int
    shards: dict[str, str]


def main() -> int:
    """Make the model, run the pairs, judge."""
    options = parse_options()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        model = options.model or write_model(Path(work) / "model", options.layers)
        runs: dict[str, list[Run]] = {"other": [], "this": []}
        pythons = {"other": options.other, "this": sys.executable}
        for pair in range(options.pairs):
            for name in list(pythons)[:: 1 if pair % 2 == 0 else -1]:
                run = quantize(pythons[name], model, options.recipe, Path(work) / "out")
                runs[name].append(run)
                print(f"{name:5}: {run.wall:7.1f} s, CPU {run.cpu:7.1f} s, peak {run.peak >> 20} MiB", flush=True)
        return judge(runs, largest_linear(model))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", required=True, help="Python that has the other quantkit installed")
    parser.add_argument("--recipe", default="rtn-int4")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--model", type=Path, help="in place of the random one")
    parser.add_argument("--work", type=Path, help="folder with room for model and result; default: that of tempfile")
    return parser.parse_args()


def write_model(folder: Path, layers: int) -> Path:
    """A random Llama of a 3B's shape with so many layers."""
    make_random_llama.SHAPES["asked"] = {**make_random_llama.SHAPES["3b"], "num_hidden_layers": layers}
    make_random_llama.make(folder, "asked")
    return folder


def quantize(python: str, model: Path, recipe: str, output: Path) -> Run:
    """One run in a process of its own, as the command line does it; its output is hashed and removed."""
    command = [python, "-m", "quantkit", "quantize", str(model), "--recipe", recipe, "-o", str(output), "--quiet"]
    before, started = os.times(), time.perf_counter()
    subprocess.run([*command, "--device", "cpu"], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - started, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    peak = json.loads((output / "quantkit-run.json").read_text())["peak_bytes"]
    shards = {path.name: digest(path) for path in sorted(output.glob("*.safetensors"))}
    shutil.rmtree(output)
    return Run(wall, cpu, peak, shards)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def largest_linear(model: Path) -> int:
    """Bytes of the largest matrix in the decoder layers."""
    from quantkit.checkpoints.reader import CheckpointReader

    reader = CheckpointReader(model)
    return max(reader.info(name).num_bytes for name in reader.names if ".layers." in name)


def judge(runs: dict[str, list[Run]], largest: int) -> int:
    """Print the ratios; 1 if something is not as it should be."""
    ratios = {
        what: statistics.median(getattr(run, what) for run in runs["this"])
        / statistics.median(getattr(run, what) for run in runs["other"])
        for what in ("wall", "cpu")
    }
    peak, limit = max(run.peak for run in runs["this"]), ROOM_BYTES + 2 * largest
    same = all(run.shards == runs["other"][0].shards for each in runs.values() for run in each)
    print(f"wall {ratios['wall']:.2f}, CPU {ratios['cpu']:.2f} of the other's time (goal: wall <= {GOAL})")
    print(f"peak {peak >> 20} MiB, limit {limit >> 20} MiB; shards {'equal' if same else 'DIFFER'}")
    return 0 if ratios["wall"] <= GOAL and peak <= limit and same else 1


if __name__ == "__main__":
    sys.exit(main())
