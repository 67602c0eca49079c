"""What compression costs, ours and other tools': every row a whole process, one after another; then the pages.

    python evals/cost/measure_cost.py --work DIR --llm-compressor PYTHON --gptqmodel PYTHON --auto-round PYTHON
    python evals/cost/measure_cost.py --work DIR --only 'gptq *'          # some rows; rows that are done are kept
    python evals/cost/measure_cost.py --work DIR --before PYTHON          # ours again, by an earlier quantkit
    python evals/cost/measure_cost.py --work DIR --rehearse tiny --samples 2         # whether it all runs; no figures

The machine should be quiet: CPU seconds that other processes took are kept with each row, and a row of a busy machine
is shown as one. A row is kept as soon as it is measured, so that a killed run goes on. Ours is measured again when its
recipe or the code behind it has changed (evals/provenance.py), a peer's with --redo only. Rehearse first: GPTQModel
compiles a kernel when it first runs. How the environments of the other tools are made: evals/peers/job.py.
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
RESULTS = EVALS / "results" / "cost"  # a file per machine: times of two are not compared
FIGURES = ("wall_s", "cpu_s", "peak_mb", "others_cpu_s")
BEFORE = "before"
COUNTED = ("gptq", "plain-gptq")  # works whose operations are counted
FEW = (2, 4)  # samples of the two runs that are counted: operations grow linearly with tokens
Entry = dict[str, Any]


def recipe_of(work: Work, samples: int | None = None) -> dict[str, Any]:
    """The recipe as plain data; ids.jsonl stands for the file of token ids."""
    made: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / f"{work.recipe}.yaml").read_text(encoding="utf-8"))
    made |= work.changes
    count = samples or work.samples
    if work.target is not None:
        return {**made, "calibration": {**made["calibration"], "samples": count}, "search": work.target}
    return {**made, "calibration": {"data": "ids.jsonl", "samples": count, "sequence_length": work.length}}


class Failed(Exception):
    """A process did."""


class Bed:
    """A folder with models and token ids, and what runs in it.

    Args:
        folder: for all that is written.
        pythons: by tool.
        shape: in place of a work's model, for a rehearsal.
        samples: likewise.
        limit_s: of one process.
    """

    def __init__(
        self, folder: Path, pythons: dict[str, str], *, shape: str = "", samples: int = 0, limit_s: float = 900
    ) -> None:
        self.folder, self.pythons, self.shape, self.samples, self.limit_s = folder, pythons, shape, samples, limit_s
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, command: list[str], name: str) -> Usage:
        """Run a process in the folder, where no other quantkit can be imported; what it said is raised if it fails."""
        log = self.folder / f"{name.replace(' ', '-')}.txt"
        usage = run_measured(command, log, environment=ALONE, folder=self.folder, limit_s=self.limit_s)
        if usage.code:
            raise Failed(f"{name}: exit code {usage.code}: {usage.said} ({log})")
        return usage

    def model(self, work: Work) -> Path:
        """Folder of a work's model, made by a process of its own if it is not there."""
        shape = self.shape or work.model
        folder = self.folder / f"{shape}-{work.dtype}"
        if not (folder / "config.json").exists():
            script = EVALS / "checks" / "make_random_llama.py"
            command = [sys.executable, str(script), str(folder), "--parameters", shape, "--dtype", work.dtype]
            self.run(command, f"make {folder.name}")
        return folder

    def ids(self, work: Work, samples: int = 0) -> Path:
        """File of token ids, the same for every tool."""
        count, draw = samples or self.samples or work.samples, random.Random(0)
        file = self.folder / f"{count}x{work.length}.jsonl"
        rows_of_ids = [[0, *(draw.randrange(2, 258) for _ in range(work.length - 1))] for _ in range(count)]
        file.write_text("".join(json.dumps({"input_ids": sample}) + "\n" for sample in rows_of_ids), encoding="utf-8")
        return file

    def measure(self, work: Work, tool: str) -> Entry:
        """One row."""
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
        """What our row rests on; of an earlier quantkit its commit."""
        if tool == OURS:
            return stamp(recipe_of(work))
        code = "import quantkit; print(quantkit.__file__)"
        command = [self.pythons[tool], "-c", code]
        file = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True).stdout
        now = stamp(versions={})
        return Stamp(commit=commit(Path(file.strip()).parent), date=now.date, machine=now.machine)

    def output(self, work: Work) -> Path:
        """What is written."""
        return self.folder / f"{work.name}-out"

    def arguments(self, work: Work, samples: int = 0) -> list[str]:
        """Of the command `quantkit`."""
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
        """Operations of the work by number type, from two runs on few samples."""
        few, more = (self.count_once(work, samples) for samples in FEW)
        steps = ((self.samples or work.samples) - FEW[0]) / (FEW[1] - FEW[0])
        return {dtype: int(few.get(dtype, 0) + steps * (count - few.get(dtype, 0))) for dtype, count in more.items()}

    def count_once(self, work: Work, samples: int) -> dict[str, int]:
        """The same of one run."""
        script = str(EVALS / "cost" / "arithmetic.py")
        usage = self.run([sys.executable, script, *self.arguments(work, samples)], f"{work.name} counted")
        counts: dict[str, int] = json.loads(usage.said)["operations"]
        return counts

    def measure_peer(self, work: Work, tool: str) -> Entry:
        """One row of another tool."""
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
    """Of this machine."""
    return RESULTS / f"{re.sub('[^a-z0-9_]+', '-', machine_class().lower())}.json"


def read_entries(path: Path) -> dict[str, Entry]:
    """Rows by key; none where there is no file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def save_entry(path: Path, name: str, entry: Entry) -> None:
    """Add or replace a row, one a line."""
    write_rows(path, read_entries(path) | {name: entry})


def changed(entry: Entry, work: Work) -> list[str]:
    """What a row of ours rests on that is another today."""
    taken = read_stamp(entry["taken"])
    return [] if taken is None or entry["tool"] != OURS else taken.changed(recipe_of(work))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and checkpoints, about 2 GB")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--only", action="append", help="pattern of '<work> <tool>'; again: or")
    parser.add_argument("--redo", action="store_true", help="measure again what is done")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="of one process")
    parser.add_argument("--rehearse", default="", metavar="SHAPE", help="another model for all; kept in --work")
    parser.add_argument("--samples", type=int, default=0, help="of a rehearsal")
    text = "of an environment with an earlier quantkit"
    parser.add_argument("--before", metavar="PYTHON", type=whole_path, help=text)
    add_options(parser)
    args = parser.parse_args()
    if args.results is None:
        args.results = args.work / "rehearsal.json" if args.rehearse or args.samples else results_file()
    args.pythons = pythons_of(args) | ({BEFORE: args.before} if args.before else {OURS: sys.executable})
    return args


def main() -> int:
    """Every row that is asked for and not done, then the pages; 1 if one of them failed."""
    args, code = arguments(), 0
    bed = Bed(args.work.resolve(), args.pythons, shape=args.rehearse, samples=args.samples, limit_s=args.limit)
    for work, tool in rows():
        tool = BEFORE if args.before and tool == OURS else tool
        name = key(work, tool)
        if args.only and not any(fnmatch.fnmatch(name, pattern) for pattern in args.only):
            continue
        if tool not in args.pythons:
            print(f"{name}: skipped, its Python was not given", file=sys.stderr)
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
