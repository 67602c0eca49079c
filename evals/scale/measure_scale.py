"""What several ranks gain on this machine: wall time, memory per rank, time in collectives, and that the bytes agree.

    python evals/scale/measure_scale.py WORK [--ranks 1,2] [--only plain-gptq,...] [--write]

Each rank has one CPU thread. The dense works are those of evals/cost, but plain GPTQ takes all sets of a layer at once;
the mixture is a Qwen3-MoE of one layer with 64 narrow experts, routed. `verify` compares the demo model in int4 with
its original. Results go to ranks.json and verify.json in evals/results/scale with `--write`, on a machine that does no
more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EVALS = HERE.parent
sys.path.insert(0, str(EVALS))
sys.path.insert(0, str(EVALS / "checks"))

from processes import run_measured  # noqa: E402
from provenance import stamp  # noqa: E402

RESULTS = EVALS / "results" / "scale"
PLAIN = ["--set", "steps.gptq.true_sequential=false", "--set", "steps.gptq.asymmetric_calibration=0"]
VERIFY = "verify"
# What differs from run to run in a report, or is timed by one rank alone; how names of the latter's ratios begin.
TIMED = ("seconds", "created", "command", "benchmark", "baseline_benchmark", "diagnosis")
SPEEDS = ("ttft_", "itl_", "tpot_", "throughput_")
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
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*WORKS, VERIFY])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    data = write_ids(options.work / "ids.jsonl", options.samples)
    same = True
    for name in options.only:
        digests = set()
        for count in options.ranks:
            if name == VERIFY:
                row, digest = measure_verify(options.work, count)
            else:
                row, digest = measure(options.work, name, count, data, options.samples)
            digests.add(digest)
            row = {"work": name, "ranks": count, **row, "digest": digest, "taken": taken()}
            print(json.dumps(row), flush=True)
            if options.write:
                write(RESULTS / ("verify.json" if name == VERIFY else "ranks.json"), row)
        same = same and len(digests) == 1
    return 0 if same else 1


def write(file: Path, row: dict[str, Any]) -> None:
    """Keep a row, with a digest of the code behind it."""
    # In a process of its own: what is measured begins with what its parent has in memory.
    code = "import json, scale_page, sys; print(scale_page.row_code(json.load(sys.stdin)))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(row), cwd=HERE, stdout=subprocess.PIPE, text=True, check=True
    )
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    rows[f"{row['work']} {row['ranks']}"] = {**row, "code": done.stdout.strip()}
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measure(work: Path, name: str, count: int, data: Path, samples: int) -> tuple[dict[str, Any], str]:
    """One run of a compression: what it took, and a digest of what it wrote."""
    model, recipe, changes = WORKS[name]
    output = work / "out"
    arguments = ["quantize", str(make_model(work, model)), "--recipe", recipe, *changes, "--calibration", str(data)]
    arguments += ["--samples", str(samples), "--sequence-length", "512", "--device", "cpu", "--quiet", "--no-resume"]
    row, _ = run(work, name, count, [*arguments, "-o", str(output)])
    record = json.loads((output / "quantkit-run.json").read_text())
    row |= {
        "recipe": recipe,
        "changes": [word for word in changes if word != "--set"],
        "layers_s": round(sum(sum(layer["seconds"].values()) for layer in record["layers"]), 2),
        "phases_s": record["seconds"],
    }
    files = sorted(path for path in output.iterdir() if path.name != "quantkit-run.json")
    return row, hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def measure_verify(work: Path, count: int) -> tuple[dict[str, Any], str]:
    """One verification: what it took, and a digest of its report without times."""
    checkpoint, output = make_checkpoint(work), work / "out"
    row, ranks = run(work, VERIFY, count, ["verify", str(checkpoint), "--threads", "1", "--quiet", "-o", str(output)])
    row |= {"answering_s": round(max(r["answering_s"] for r in ranks), 2), "answers": ranks[0]["answers"]}
    report = json.dumps(steady(json.loads((output / "report.json").read_text())), sort_keys=True)
    return row, hashlib.sha256(report.encode()).hexdigest()


def steady(value: Any) -> Any:
    """A report without what differs from run to run."""
    if isinstance(value, dict):
        return {name: steady(part) for name, part in value.items() if name not in TIMED and not name.startswith(SPEEDS)}
    return [steady(part) for part in value] if isinstance(value, list) else value


def run(work: Path, name: str, count: int, arguments: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of a command into `out`: what the whole took, and what each rank has written down."""
    folder = work / "ranks"
    for path in (work / "out", folder):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir()
    command = [sys.executable, str(HERE / "worker.py"), str(folder), *arguments]
    command += ["--nproc", str(count)] if count > 1 else []
    usage = run_measured(command, work / f"{name}-{count}.txt", environment={"OMP_NUM_THREADS": "1"})
    if usage.code:
        sys.exit(f"{name} on {count}: exit code {usage.code}: {usage.said}")
    ranks = [json.loads((folder / f"rank{number}.json").read_text()) for number in range(count)]
    row = {
        "wall_s": usage.wall_s,
        "collectives_s": [round(rank["collectives_s"], 2) for rank in ranks],
        "cpu_s": [round(rank["cpu_s"], 2) for rank in ranks],
        "peak_mb": [rank["peak_mb"] for rank in ranks],
        "others_cpu_s": usage.others_cpu_s,
    }
    return row, ranks


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
    mixture = [str(HERE / "mixtures.py"), shape]
    llama = [str(EVALS / "checks" / "make_random_llama.py"), "--parameters", shape]
    return made(work, work / shape, mixture if shape == "narrow" else llama)


def make_checkpoint(work: Path) -> Path:
    """The demo model in int4."""
    words = ["-m", "quantkit", "quantize", "--recipe", "awq-int4", "--samples", "16", "--device", "cpu", "-o"]
    return made(work, work / "demo-awq-int4", words)


def made(work: Path, folder: Path, words: list[str]) -> Path:
    """A folder that Python makes, given these words and its name, where it is not there yet."""
    if not (folder / "config.json").exists():
        usage = run_measured([sys.executable, *words, str(folder)], work / "make.txt")
        if usage.code:
            sys.exit(f"{folder.name}: {usage.said}")
    return folder


if __name__ == "__main__":
    sys.exit(main())
