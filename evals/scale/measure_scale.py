"""What several ranks gain on this machine: wall time, memory per rank, time in collectives, and that the bytes agree.

    python evals/scale/measure_scale.py WORK [--ranks 1,2] [--only plain-gptq,...] [--write]

Each rank has one CPU thread. The dense works are those of evals/cost; the mixture is a Qwen3-MoE of one layer with 64
narrow experts, routed. Results go to evals/results/scale/ranks.json with `--write`, on a machine that does no more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

EVALS = Path(__file__).parents[1]
sys.path.insert(0, str(EVALS))
sys.path.insert(0, str(EVALS / "checks"))

from processes import run_measured  # noqa: E402
from provenance import stamp  # noqa: E402

RESULTS = EVALS / "results" / "scale" / "ranks.json"
PLAIN = ["--set", "steps.gptq.true_sequential=false", "--set", "steps.gptq.asymmetric_calibration=0"]
# Name: model, recipe, options.
WORKS: dict[str, tuple[str, str, list[str]]] = {
    "plain-gptq": ("1b-2layers", "gptq-int4", PLAIN),
    "gptq": ("1b-2layers", "gptq-int4", []),
    "awq": ("1b-2layers", "awq-int4", []),
    "moe-gptq": ("narrow", "gptq-int4", [*PLAIN, "--set", "calibration.experts=routed"]),
}


def main() -> int:
    """Every work with every number of ranks; exit code 1 if their bytes differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(WORKS))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    data = write_ids(options.work / "ids.jsonl", options.samples)
    measured: list[dict[str, Any]] = []
    same = True
    for name in options.only:
        digests = set()
        for count in options.ranks:
            row, digest = measure(options.work, name, count, data, options.samples)
            digests.add(digest)
            _, recipe, words = WORKS[name]
            about = {"work": name, "ranks": count, "recipe": recipe, "changes": [w for w in words if w != "--set"]}
            measured.append({**about, **row, "taken": taken()})
            print(json.dumps(measured[-1]), flush=True)
        same = same and len(digests) == 1
    if options.write:
        write(measured)
    return 0 if same else 1


def write(measured: list[dict[str, Any]]) -> None:
    """Keep rows, with digests of the code behind them."""
    from scale_page import row_code  # last: what is measured begins with what its parent has in memory

    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows |= {f"{row['work']} {row['ranks']}": {**row, "code": row_code(row)} for row in measured}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measure(work: Path, name: str, count: int, data: Path, samples: int) -> tuple[dict[str, Any], str]:
    """One run: what it took, and a digest of what it wrote."""
    model, recipe, changes = WORKS[name]
    output, folder = work / "out", work / "ranks"
    for path in (output, folder):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir()
    arguments = ["quantize", str(make_model(work, model)), "--recipe", recipe, *changes, "--calibration", str(data)]
    arguments += ["--samples", str(samples), "--sequence-length", "512", "--device", "cpu", "--quiet"]
    arguments += ["-o", str(output)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
    worker = str(EVALS / "scale" / "worker.py")
    command = [sys.executable, *launcher, worker, str(folder), *arguments, "--no-resume"]
    usage = run_measured(command, work / f"{name}-{count}.txt", environment={"OMP_NUM_THREADS": "1"})
    if usage.code:
        sys.exit(f"{name} on {count}: exit code {usage.code}: {usage.said}")
    record = json.loads((output / "quantkit-run.json").read_text())
    ranks = [json.loads((folder / f"rank{number}.json").read_text()) for number in range(count)]
    files = sorted(path for path in output.iterdir() if path.name != "quantkit-run.json")
    row = {
        "wall_s": usage.wall_s,
        "layers_s": round(sum(sum(layer["seconds"].values()) for layer in record["layers"]), 2),
        "phases_s": record["seconds"],
        "collectives_s": [round(rank["collectives_s"], 2) for rank in ranks],
        "cpu_s": [round(rank["cpu_s"], 2) for rank in ranks],
        "peak_mb": [rank["peak_mb"] for rank in ranks],
        "others_cpu_s": usage.others_cpu_s,
    }
    return row, hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def taken() -> dict[str, Any]:
    """Where and on what a row was measured."""
    from dataclasses import asdict

    return asdict(stamp())


def write_ids(file: Path, samples: int) -> Path:
    """Random token ids of bytes, as in evals/cost."""
    draw = random.Random(0)
    rows = [[0, *(draw.randrange(2, 258) for _ in range(511))] for _ in range(samples)]
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows), encoding="utf-8")
    return file


def make_model(work: Path, shape: str) -> Path:
    """A random model of this shape, made by a process of its own where it is not there yet."""
    folder = work / shape
    if not (folder / "config.json").exists():
        mixture = [str(EVALS / "scale" / "mixtures.py"), shape, str(folder)]
        llama = [str(EVALS / "checks" / "make_random_llama.py"), str(folder), "--parameters", shape]
        usage = run_measured([sys.executable, *(mixture if shape == "narrow" else llama)], work / "make.txt")
        if usage.code:
            sys.exit(f"{shape}: {usage.said}")
    return folder


if __name__ == "__main__":
    sys.exit(main())
