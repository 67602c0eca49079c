"""Quantize and measure every declared row that is not done yet; then write docs/accuracy.md.

    python evals/accuracy/run.py --work DIR                                    # the demo model, nothing else needed
    python evals/accuracy/run.py --work DIR --models DIR --data DIR            # all models of `rows.py`
    python evals/accuracy/run.py --work DIR --only 'demo w4g32 *'              # some rows

--models holds babyllama-361 and stories260k; --data holds tinystories/{calibration,validation}.txt and
benchmarks/blimp/*.jsonl. Results are kept after every row, so a killed run goes on; a row is measured again when its
recipe or the code that quantizes has changed, unless --keep.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from bench import Bench, ask, measure, open_bench, write_calibration
from page import write_page
from rows import MODELS, Model, Wanted, recipe, wanted
from score import score
from store import RESULTS, Row, Rows, load_rows, save_rows

import quantkit

COMPRESS = ("algorithms", "calibration", "numerics")
ORIGINAL = "original"


def code_digest() -> str:
    """Of the code that decides which codes and scales a recipe gives."""
    root = Path(quantkit.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for part in COMPRESS for path in (root / part).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def quantize(bench: Bench, data: dict[str, Any], work: Path) -> tuple[Path, float, int] | str:
    """Quantize in a process of its own.

    Args:
        bench: of the model.
        data: the recipe.
        work: folder of outputs.
    Returns:
        The checkpoint, CPU seconds and peak MB of the process; or what it said when it failed.
    """
    file, output = work / "recipe.yaml", work / "checkpoint"
    file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "quantkit", "quantize", str(bench.path), "--recipe", str(file), "-o", str(output)]
    with (work / "log.txt").open("w") as log:
        process = subprocess.Popen([*command, "--no-resume", "--quiet"], stdout=log, stderr=log, cwd=work)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        return (work / "log.txt").read_text(errors="replace").strip().splitlines()[-1]
    # Its own record: ru_maxrss of a child begins with what this process has in memory.
    peak = json.loads((output / "quantkit-run.json").read_text(encoding="utf-8"))["peak_bytes"]
    return output, usage.ru_utime + usage.ru_stime, peak // 2**20


def run_row(bench: Bench, row: Wanted, work: Path, *, tasks: bool) -> Row | str:
    """Quantize and measure one row; or what went wrong."""
    data = recipe(row, str(work / "calibration.jsonl"))
    made = quantize(bench, data, work)
    if isinstance(made, str):
        return made
    checkpoint, cpu_s, peak_mb = made
    return measure(
        bench,
        checkpoint,
        tasks=tasks,
        tool="quantkit",
        method=row.method,
        numbers=row.numbers,
        symmetric=row.symmetric,
        how=yaml.safe_dump(data.get("steps", []), default_flow_style=True).strip(),
        cpu_s=round(cpu_s, 1),
        peak_mb=peak_mb,
        identity=identity(row),
    )


def identity(row: Wanted) -> str:
    """Changes when the row has to be measured again."""
    return hashlib.sha256(json.dumps([recipe(row, ""), code_digest()]).encode()).hexdigest()[:16]


def original_row(bench: Bench, *, tasks: bool) -> Row:
    """The original, measured like any row."""
    (found,) = score([bench.original], bench.original, bench.windows, bench.reference)
    return Row(
        tool=ORIGINAL,
        method="",
        numbers="fp32",
        symmetric=True,
        windows=found.windows,
        tokens=found.tokens,
        nll=found.nll,
        kl=found.kl,
        top1=found.top1,
        tasks=ask(bench, bench.original) if tasks else {},
    )


def run_model(model: Model, args: argparse.Namespace) -> None:
    """All rows of one model that are asked for and not done."""
    path = args.results / f"{model.name}.json"
    rows: Rows = load_rows(path)
    todo = [row for row in wanted(model) if fnmatch.fnmatch(f"{model.name} {row.key}", args.only)]
    asked = {row.key for row in todo if model.tasks and fnmatch.fnmatch(f"{model.name} {row.key}", args.tasks)}
    todo = [row for row in todo if args.redo or not _is_done(rows.get(row.key), row, args.keep, row.key in asked)]
    ask_original = bool(asked) and not (ORIGINAL in rows and rows[ORIGINAL].tasks)
    if not todo and ORIGINAL in rows and not ask_original:
        return
    bench = open_bench(model, args.models, args.data)
    work = (args.work / model.name).resolve()
    work.mkdir(parents=True, exist_ok=True)
    write_calibration(bench, work / "calibration.jsonl")
    if ORIGINAL not in rows or ask_original:
        save_rows(path, load_rows(path) | {ORIGINAL: original_row(bench, tasks=bool(asked))})
    for row in todo:
        found = run_row(bench, row, work, tasks=row.key in asked)
        if isinstance(found, str):
            print(f"{model.name} {row.key}: not measured: {found}", file=sys.stderr)
            continue
        save_rows(path, load_rows(path) | {row.key: found})
        kl = sum(found.kl) / len(found.kl)
        print(f"{model.name} {row.key}: KL {kl:.5f}, {found.cpu_s} CPU s, {found.peak_mb} MB", flush=True)


def _is_done(found: Row | None, row: Wanted, keep: bool, asked: bool) -> bool:
    return found is not None and (bool(found.tasks) or not asked) and (keep or found.identity == identity(row))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", default="*", help="pattern of '<model> <numbers> <method> <sym|asym>'")
    parser.add_argument("--redo", action="store_true", help="measure again what is done")
    parser.add_argument("--keep", action="store_true", help="do not measure again what older code did")
    parser.add_argument("--tasks", default="*", help="pattern of the rows that are asked the tasks; '' = none")
    return parser.parse_args()


def main() -> None:
    """Everything that can be measured with what is given."""
    args = arguments()
    for model in MODELS:
        if model.text is not None and (args.models is None or args.data is None):
            print(f"{model.name}: skipped, it needs --models and --data", file=sys.stderr)
        elif fnmatch.filter([f"{model.name} {row.key}" for row in wanted(model)], args.only):
            run_model(model, args)
    write_page(args.results)


if __name__ == "__main__":
    main()
