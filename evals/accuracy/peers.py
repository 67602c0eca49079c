"""Quantize with other tools in their own environments, measure with the same code as ours, and write the pages.

    python evals/accuracy/peers.py --work DIR --llm-compressor PYTHON --gptqmodel PYTHON --auto-round PYTHON
        [--models DIR --data DIR] [--only 'babyllama-361 w8pc *']

Each row is saved in results/accuracy/peers-<model>.json when it is done. If a row of the same tool version is saved
with its seconds, only --redo measures it again. evals/peers/job.py says how to make the environments.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pages
from bench import Bench, measure, open_bench, write_calibration
from peer_tools import TOOLS, add_options, job_command, pythons_of
from processes import ALONE, ONE_THREAD, run_measured
from provenance import stamp
from rows import MODELS, Model, Peer, peer_job, peer_rows, peers_of_trained
from run import is_asked, said
from safetensors import safe_open
from store import RESULTS, Row, add_row, load_rows

from quantkit.errors import CheckpointError


def version_of(python: str, package: str) -> str:
    """Return the version of a package in another environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def left_as_they_were(checkpoint: Path) -> list[str]:
    """Return the layers' matrices that a tool did not quantize; auto-round skips sizes that 32 does not divide."""
    names = []
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                tensor = tensors.get_slice(name)
                is_plain = tensor.get_dtype() in ("F32", "F16", "BF16") and len(tensor.get_shape()) == 2
                if is_plain and ".layers." in name and name.endswith(".weight"):
                    names.append(name)
    return names


def run_row(bench: Bench, peer: Peer, numbers: str, symmetric: bool, args: argparse.Namespace, work: Path) -> Row | str:
    """Quantize and measure one row; if a step fails, return the reason."""
    package, _ = TOOLS[peer.tool]
    output, job = work / "checkpoint", peer_job(peer, numbers, symmetric)
    shutil.rmtree(output, ignore_errors=True)
    folders = {"model": str(bench.path), "output": str(output), "ids": str(work / "calibration.jsonl")}
    words = job_command(peer.tool, args.pythons[peer.tool], {**job, **folders})
    usage = run_measured(words, work / "log.txt", environment=ALONE | ONE_THREAD, folder=work, limit_s=args.limit)
    if usage.code:
        return usage.said or f"killed after {args.limit} s"
    report: dict[str, Any] = json.loads(usage.said)
    checkpoint = next(output.rglob("config.json")).parent
    if left := left_as_they_were(checkpoint):
        return f"{len(left)} matrices of its layers are not quantized, including {left[0]}"
    try:
        return measure(
            bench,
            checkpoint,
            tasks=False,
            tool=f"{peer.tool} {report['versions'][package]}",
            method=peer.method,
            numbers=numbers,
            symmetric=symmetric,
            samples=bench.model.samples,
            length=bench.model.length,
            how=", ".join(f"{name}={value}" for name, value in job["options"].items()),
            cpu_s=usage.cpu_s,
            others=usage.others_share,
            peak_mb=report["peak_mb"],
            taken=stamp(versions=report["versions"]),
        )
    except CheckpointError as error:
        return str(error)


def run_model(model: Model, args: argparse.Namespace) -> None:
    """Measure the requested rows of one model that are missing."""
    path = args.results / f"peers-{model.name}.json"
    done, bench, work = load_rows(path), None, (args.work / f"peers-{model.name}").resolve()
    further = [row for row in peers_of_trained(model) if row[1] not in model.numbers]
    for peer, numbers, symmetric in (*peer_rows(model), *further):
        if peer.tool not in args.pythons:
            continue
        key = peer.key(numbers, symmetric, args.versions[peer.tool])
        if not is_asked(f"{model.name} {key}", args.only) or (key in done and done[key].has_cost and not args.redo):
            continue
        if bench is None:
            bench = open_bench(model, args.models, args.data)
            work.mkdir(parents=True, exist_ok=True)
            write_calibration(bench, work / "calibration.jsonl")
        found = run_row(bench, peer, numbers, symmetric, args, work)
        if isinstance(found, str):
            print(f"{model.name} {key}: not measured: {found}", file=sys.stderr)
            continue
        add_row(path, key, found)
        print(f"{model.name} {key}: {said(found)}", flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", action="append", help="pattern of '<model> <key of the row>'; repeatable")
    parser.add_argument("--redo", action="store_true")
    parser.add_argument("--limit", type=float, default=1200, metavar="SECONDS", help="limit for one quantization")
    add_options(parser)
    args = parser.parse_args()
    args.pythons = pythons_of(args)
    args.versions = {tool: version_of(python, TOOLS[tool][0]) for tool, python in args.pythons.items()}
    return args


def main() -> None:
    """Measure all rows, then write the pages."""
    args = arguments()
    for model in MODELS:
        if model.text is None or (args.models is not None and args.data is not None):
            run_model(model, args)
    if args.results == RESULTS:
        pages.write_all()


if __name__ == "__main__":
    main()
