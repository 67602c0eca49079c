"""Quantize and measure every declared row that is not done yet; then write the pages.

    python evals/accuracy/run.py --list                                        # list the rows and their state
    python evals/accuracy/run.py --work DIR                                    # the demo model; needs nothing else
    python evals/accuracy/run.py --work DIR --models DIR --data DIR            # all models of `rows.py`
    python evals/accuracy/run.py --work DIR --only 'demo w4g32 *' --only 'demo w8pc *'   # some rows

The folder of --models contains babyllama-361, stories260k and the real models of `rows.py`. The folder of --data
contains tinystories/{calibration,validation}.txt, wikitext2/test.raw.txt and benchmarks/blimp/*.jsonl. Each row is
saved when it is done, so a killed run can be continued, and several runs can work at the same time. A row is measured
again if its recipe or the code that quantizes has changed (`provenance.Stamp.changed`), or if its seconds are not
known. --keep turns this off.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pages
from bench import Bench, ask, measure, open_bench, write_calibration
from processes import ONE_THREAD, Usage, run_measured
from provenance import stamp
from rows import MODELS, Model, Wanted, trained, wanted, whole
from score import score
from store import RESULTS, Row, Rows, add_row, load_rows

ORIGINAL = "original"
Made = tuple[Path, Usage, int]


def quantize(bench: Bench, data: dict[str, Any], work: Path) -> Made | str:
    """Quantize in a separate process.

    Args:
        bench: bench of the model.
        data: the recipe.
        work: folder of outputs.
    Returns:
        The checkpoint, the time that the process used, and its peak memory in MiB; the last output line if it failed.
    """
    file, output = work / "recipe.yaml", work / "checkpoint"
    written = {key: value for key, value in data.items() if key != "distill"}
    file.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "quantkit", "quantize", str(bench.path), "--recipe", str(file), "-o", str(output)]
    command += ["--no-resume", "--quiet", "--device", "cpu"]
    usage = run_measured(command, work / "log.txt", environment=ONE_THREAD)
    if usage.code:
        return usage.said
    # From the process's own record, because wait4 includes memory that a child inherits from this process.
    peak = json.loads((output / "quantkit-run.json").read_text(encoding="utf-8"))["peak_bytes"]
    if "distill" in data:
        return distill(bench, output, data, usage)
    return output, usage, peak // 2**20


def distill(bench: Bench, checkpoint: Path, data: dict[str, Any], before: Usage) -> Made | str:
    """Train a checkpoint with `quantkit distill` in a separate process; see `quantize`.

    Args:
        bench: bench of the model.
        checkpoint: the checkpoint.
        data: the row's recipe.
        before: time that quantizing took, which is added.
    """
    output, log, calibration = checkpoint.with_name("distilled"), checkpoint.with_name("log.txt"), data["calibration"]
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "quantkit", "distill", str(checkpoint), "--baseline", str(bench.path)]
    command += ["--calibration", calibration["data"], "--samples", str(calibration["samples"])]
    command += ["--sequence-length", str(calibration["sequence_length"]), "--steps", str(data["distill"]["steps"])]
    command += ["-o", str(output), "--no-resume", "--json", "--device", "cpu"]
    usage = run_measured(command, log, environment=ONE_THREAD)
    if usage.code:
        return usage.said
    result = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    sums = {name: getattr(usage, name) + getattr(before, name) for name in ("wall_s", "cpu_s", "others_cpu_s")}
    return output, replace(usage, **sums), result["peak_bytes"] // 2**20


def run_row(bench: Bench, row: Wanted, work: Path, *, tasks: bool) -> Row | str:
    """Quantize and measure one row; if a step fails, return the reason."""
    data = whole(row, str(work / "calibration.jsonl"))
    made = quantize(bench, data, work)
    if isinstance(made, str):
        return made
    checkpoint, usage, peak_mb = made
    taken = stamp(data)
    return measure(
        bench,
        checkpoint,
        tasks=tasks,
        tool="quantkit",
        method=row.method,
        numbers=row.numbers,
        symmetric=row.symmetric,
        samples=row.samples,
        length=row.length,
        how=yaml.safe_dump(data.get("steps", []), default_flow_style=True).strip(),
        cpu_s=usage.cpu_s,
        others=usage.others_share,
        peak_mb=peak_mb,
        taken=taken,
    )


def original_row(bench: Bench, *, tasks: bool) -> Row:
    """Measure the original like any other row."""
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
        taken=stamp({}),
    )


def declared(model: Model) -> list[Wanted]:
    """Return the rows of the pages on accuracy and on distillation, each of them once."""
    return list(dict.fromkeys((*wanted(model), *trained(model))))


def run_model(model: Model, args: argparse.Namespace) -> None:
    """Measure all requested rows of one model that are not done."""
    path = args.results / f"{model.name}.json"
    rows: Rows = load_rows(path)
    todo = [row for row in declared(model) if is_asked(f"{model.name} {row.key}", args.only)]
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
        add_row(path, ORIGINAL, original_row(bench, tasks=bool(asked)))
    for row in todo:
        found = run_row(bench, row, work, tasks=row.key in asked)
        if isinstance(found, str):
            print(f"{model.name} {row.key}: not measured: {found}", file=sys.stderr)
            continue
        add_row(path, row.key, found)
        print(f"{model.name} {row.key}: {said(found)}", flush=True)


def said(row: Row) -> str:
    """Describe a row in one line."""
    return f"KL {sum(row.kl) / len(row.kl):.5f}, {row.cpu_s} CPU s, others used {row.others:.0%}, {row.peak_mb} MB"


def is_asked(name: str, patterns: list[str] | None) -> bool:
    """Whether a name matches one of the patterns; without patterns, every name does."""
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _is_done(found: Row | None, row: Wanted, keep: bool, asked: bool) -> bool:
    if found is None or (asked and not found.tasks):
        return False
    return keep or (found.has_cost and not changes(found, row))


def changes(found: Row, row: Wanted) -> list[str]:
    """Return what has changed since a row was measured: the recipe, or names of modules."""
    return ["the recipe or the code"] if found.taken is None else found.taken.changed(whole(row, "calibration.jsonl"))


def print_rows(args: argparse.Namespace) -> None:
    """Print the requested rows and their state."""
    for model in MODELS:
        rows = load_rows(args.results / f"{model.name}.json")
        for row in declared(model):
            if is_asked(f"{model.name} {row.key}", args.only):
                print(f"{model.name} {row.key}: {_state(rows.get(row.key), row)}")


def _state(found: Row | None, row: Wanted) -> str:
    if found is None:
        return "missing"
    seconds = f", {found.cpu_s:.0f} CPU s" if found.has_cost else ", seconds not known"
    change = changes(found, row)
    return (f"measured before the last change of {change[0]}" if change else "done") + seconds


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for checkpoints")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--only", action="append", help="pattern of '<model> <numbers> <method> <sym|asym>'; repeatable"
    )
    parser.add_argument("--redo", action="store_true", help="measure finished rows again")
    parser.add_argument("--keep", action="store_true", help="keep the rows that older code measured")
    parser.add_argument("--tasks", default="", help="pattern of the rows on which tasks are run; '' = none")
    parser.add_argument("--list", action="store_true", help="print the rows and their state; measure nothing")
    args = parser.parse_args()
    if args.work is None and not args.list:
        parser.error("--work is needed")
    return args


def main() -> None:
    """Measure all requested rows for which models and data are given."""
    args = arguments()
    if args.list:
        print_rows(args)
        return
    for model in MODELS:
        if not any(is_asked(f"{model.name} {row.key}", args.only) for row in declared(model)):
            continue
        if model.text is not None and (args.models is None or args.data is None):
            print(f"{model.name}: skipped, it needs --models and --data", file=sys.stderr)
        else:
            run_model(model, args)
    if args.results == RESULTS:
        pages.write_all()


if __name__ == "__main__":
    main()
