"""Measure what compression costs with quantkit and with other tools, one process after another; then write the pages.

    python evals/cost/measure_cost.py --work DIR --llm-compressor PYTHON --gptqmodel PYTHON --auto-round PYTHON
    python evals/cost/measure_cost.py --work DIR --only 'gptq *'          # some rows; finished rows are kept
    python evals/cost/measure_cost.py --work DIR --before PYTHON          # our rows with an earlier quantkit
    python evals/cost/measure_cost.py --work DIR --rehearse tiny --samples 2         # test that all runs; no figures

The machine should be quiet. Each row is saved with the CPU seconds that other processes used, and the page marks rows
of a busy machine. A row is saved when it is measured, so a killed run can be continued. Our row is measured again if
its recipe or the code behind it has changed (evals/provenance.py); a peer's row is measured again only with --redo. Use
--rehearse first, because GPTQModel compiles a kernel when it first runs. evals/peers/job.py says how to make the
environments of the other tools.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from works import OURS, Work, key, rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_tools import TOOLS, add_options, job_command, pythons_of
from processes import ALONE, Usage, run_measured, whole_path
from provenance import ROOT, Stamp, commit, machine_class, plain, read_stamp, stamp, write_rows

EVALS = ROOT / "evals"
RESULTS = EVALS / "results" / "cost"  # one file per machine, because times of different machines are not compared
FIGURES = ("wall_s", "cpu_s", "peak_mb", "others_cpu_s")
BEFORE = "before"
COUNTED = ("gptq", "plain-gptq")  # works whose operations are counted
FEW = (2, 4)  # samples of the two runs that are counted: operations grow linearly with tokens
Entry = dict[str, Any]


def recipe_of(work: Work, samples: int | None = None) -> dict[str, Any]:
    """Return the recipe as plain data, with `ids.jsonl` in the place of the path of the file with token ids."""
    made: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / f"{work.recipe}.yaml").read_text(encoding="utf-8"))
    made |= work.changes
    count = samples or work.samples
    if work.target is not None:
        return {**made, "calibration": {**made["calibration"], "samples": count}, "search": work.target}
    return {**made, "calibration": {"data": "ids.jsonl", "samples": count, "sequence_length": work.length}}


class Failed(Exception):
    """A process failed."""


class Bed:
    """A folder with models and token ids, and the processes that run in it.

    Args:
        folder: folder for all files.
        pythons: Python of each tool.
        shape: shape that replaces the model of every work, for a rehearsal; empty = no replacement.
        samples: number of calibration sequences that replaces that of every work; 0 = no replacement.
        limit_s: maximum seconds of one process.
    """

    def __init__(
        self, folder: Path, pythons: dict[str, str], *, shape: str = "", samples: int = 0, limit_s: float = 900
    ) -> None:
        self.folder, self.pythons, self.shape, self.samples, self.limit_s = folder, pythons, shape, samples, limit_s
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, command: list[str], name: str) -> Usage:
        """Run a process in the folder, where no other quantkit can be imported; if it fails, raise Failed."""
        log = self.folder / f"{name.replace(' ', '-')}.txt"
        usage = run_measured(command, log, environment=ALONE, folder=self.folder, limit_s=self.limit_s)
        if usage.code:
            raise Failed(f"{name}: exit code {usage.code}: {usage.said} ({log})")
        return usage

    def model(self, work: Work) -> Path:
        """Return the folder of a work's model; a separate process makes the model if it does not exist."""
        shape = self.shape or work.model
        folder = self.folder / f"{shape}-{work.dtype}"
        if not (folder / "config.json").exists():
            script = EVALS / "checks" / "make_random_llama.py"
            command = [sys.executable, str(script), str(folder), "--parameters", shape, "--dtype", work.dtype]
            self.run(command, f"make {folder.name}")
        return folder

    def ids(self, work: Work, samples: int = 0) -> Path:
        """Write the file of token ids, which is the same for every tool, and return its path."""
        count, draw = samples or self.samples or work.samples, random.Random(0)
        file = self.folder / f"{count}x{work.length}.jsonl"
        rows_of_ids = [[0, *(draw.randrange(2, 258) for _ in range(work.length - 1))] for _ in range(count)]
        file.write_text("".join(json.dumps({"input_ids": sample}) + "\n" for sample in rows_of_ids), encoding="utf-8")
        return file

    def measure(self, work: Work, tool: str) -> Entry:
        """Measure one row."""
        if tool in TOOLS:
            return self.measure_peer(work, tool)
        rates = json.loads(self.run([sys.executable, str(EVALS / "cost" / "machine.py")], "machine").said)
        usage = self.run([self.pythons[tool], "-m", "quantkit", *self.arguments(work)], key(work, tool))
        entry = _entry(work, tool, usage, self.stamp(work, tool)) | rates
        if work.target is None:
            record = json.loads((self.output(work) / "quantkit-run.json").read_text(encoding="utf-8"))
            entry["layers_s"] = round(sum(sum(layer["seconds"].values()) for layer in record["layers"]), 2)
        if work.name in COUNTED and tool == OURS:
            entry["operations"] = self.count(work)
        shutil.rmtree(self.output(work), ignore_errors=True)
        return entry

    def stamp(self, work: Work, tool: str) -> Stamp:
        """Return the stamp of our row; for an earlier quantkit, it holds the commit but no digests."""
        if tool == OURS:
            return stamp(recipe_of(work))
        code = "import quantkit; print(quantkit.__file__)"
        command = [self.pythons[tool], "-c", code]
        file = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True).stdout
        now = stamp(versions={})
        return Stamp(commit=commit(Path(file.strip()).parent), date=now.date, machine=now.machine)

    def output(self, work: Work) -> Path:
        """Return the folder for the output of a work."""
        return self.folder / f"{work.name}-out"

    def arguments(self, work: Work, samples: int = 0) -> list[str]:
        """Return the arguments of `quantkit` for a work, and delete old output."""
        count, output = samples or self.samples or work.samples, self.output(work)
        shutil.rmtree(output, ignore_errors=True)
        if work.target is not None:
            words = ["search", "--recipe", work.recipe, "--bits", work.target, "--set", f"calibration.samples={count}"]
            return [*words, "-o", str(output.with_suffix(".yaml")), "--overwrite", "--no-resume", "--device", "cpu"]
        file = self.folder / f"{work.name}.yaml"
        recipe = recipe_of(work, count)
        recipe["calibration"]["data"] = str(self.ids(work, count))
        file.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
        words = ["quantize", str(self.model(work)), "--recipe", str(file), "-o", str(output)]
        return [*words, "--no-resume", "--quiet", "--device", "cpu"]

    def count(self, work: Work) -> dict[str, int]:
        """Count the operations of a work by number type, extrapolated from two runs on few samples."""
        few, more = (self.count_once(work, samples) for samples in FEW)
        steps = ((self.samples or work.samples) - FEW[0]) / (FEW[1] - FEW[0])
        return {dtype: int(few.get(dtype, 0) + steps * (count - few.get(dtype, 0))) for dtype, count in more.items()}

    def count_once(self, work: Work, samples: int) -> dict[str, int]:
        """Count the operations of one run by number type."""
        script = str(EVALS / "cost" / "arithmetic.py")
        usage = self.run([sys.executable, script, *self.arguments(work, samples)], f"{work.name} counted")
        counts: dict[str, int] = json.loads(usage.said)["operations"]
        return counts

    def measure_peer(self, work: Work, tool: str) -> Entry:
        """Measure one row of another tool."""
        output = self.folder / "peer-out"
        shutil.rmtree(output, ignore_errors=True)
        folders = {"model": str(self.model(work)), "output": str(output)}
        job = {**work.jobs[tool], **folders, "ids": str(self.ids(work))}
        usage = self.run(job_command(tool, self.pythons[tool], job), key(work, tool))
        shutil.rmtree(output, ignore_errors=True)
        versions = json.loads(usage.said)["versions"]
        return _entry(work, f"{tool} {versions[TOOLS[tool][0]]}", usage, stamp(versions=versions))


def _entry(work: Work, tool: str, usage: Usage, taken: Stamp) -> Entry:
    figures = {name: getattr(usage, name) for name in FIGURES}
    return {"work": work.name, "tool": tool, **figures, "taken": plain(taken)}


def results_file() -> Path:
    """Return the path of the results of this machine."""
    return RESULTS / f"{re.sub('[^a-z0-9_]+', '-', machine_class().lower())}.json"


def read_entries(path: Path) -> dict[str, Entry]:
    """Return the rows of a file by key; no rows if the file does not exist."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def save_entry(path: Path, name: str, entry: Entry) -> None:
    """Add or replace a row; the file has one row per line."""
    write_rows(path, read_entries(path) | {name: entry})


def changed(entry: Entry, work: Work) -> list[str]:
    """Return what has changed since a row of ours was measured; nothing for rows of peers."""
    taken = read_stamp(entry["taken"])
    return [] if taken is None or entry["tool"] != OURS else taken.changed(recipe_of(work))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and checkpoints, about 2 GB")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--only", action="append", help="pattern of '<work> <tool>'; repeatable")
    parser.add_argument("--redo", action="store_true", help="measure finished rows again")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="limit for one process")
    parser.add_argument("--rehearse", default="", metavar="SHAPE", help="model for all works; results stay in --work")
    parser.add_argument("--samples", type=int, default=0, help="calibration sequences in a rehearsal")
    text = "Python of an environment with an earlier quantkit"
    parser.add_argument("--before", metavar="PYTHON", type=whole_path, help=text)
    add_options(parser)
    args = parser.parse_args()
    if args.results is None:
        args.results = args.work / "rehearsal.json" if args.rehearse or args.samples else results_file()
    args.pythons = pythons_of(args) | ({BEFORE: args.before} if args.before else {OURS: sys.executable})
    return args


def main() -> int:
    """Measure every requested row that is not done, then write the pages; return 1 if a row failed."""
    args, code = arguments(), 0
    bed = Bed(args.work.resolve(), args.pythons, shape=args.rehearse, samples=args.samples, limit_s=args.limit)
    for work, tool in rows():
        tool = BEFORE if args.before and tool == OURS else tool
        name = key(work, tool)
        if args.only and not any(fnmatch.fnmatch(name, pattern) for pattern in args.only):
            continue
        if tool not in args.pythons:
            print(f"{name}: skipped, because its Python was not given", file=sys.stderr)
            continue
        entry = read_entries(args.results).get(name)
        if entry is None or args.redo or changed(entry, work):
            try:
                entry = bed.measure(work, tool)
            except Failed as error:
                print(error, file=sys.stderr)
                code = 1
                continue
            save_entry(args.results, name, entry)
        print(name, *(f"{figure} {entry[figure]}" for figure in FIGURES), flush=True)
    if args.results.parent == RESULTS:
        import pages

        pages.write_all()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
