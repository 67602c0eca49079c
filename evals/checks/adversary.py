"""An adversary: every command on files that a stranger has changed, in a child with limits, beside files of the user.

    python evals/checks/adversary.py [--runs 300] [--seed 0] [--seconds 600] [--jobs 2] [--commands inspect,plan]

A finding is: exit code 1 or another than documented, a signal, a traceback, more than one line of error, a hang, more
memory than the bound, other than one JSON object on stdout under --json, a file of the user's changed or gone, or its
contents in what the command wrote. `--plant NAMES` puts defects into the program, to see that they are found. Prints a
line per finding, with the seed that repeats it alone, and counts by command and exit code; exit code 1 if any.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

for _name, _value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
    os.environ.setdefault(_name, _value)
sys.path.insert(0, str(Path(__file__).parent))

import hostile  # noqa: E402
from limited_child import LIMIT_BYTES, PLANTS, import_all, run_command, supervise  # noqa: E402

SECRET = "the user's own: 4d7c2f"
LIMIT_S = 60.0
EXIT_CODES = (0, 2, 3, 4, 5)

FOLDER = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "*.safetensors")
OURS = (*FOLDER, "model.safetensors.index.json", "quantkit.json", "quantkit-run.json")
SCORED = ("--text", "text.txt", "--suite", "none")
VERIFIED = (*SCORED, "--no-bench", "--no-sensitivity", "--gate", "kl<=1000")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command and what of its files is changed.

    Args:
        arguments: as given.
        files: one or two of them are mutated.
        weight: how often it is drawn.
    """

    arguments: tuple[str, ...]
    files: tuple[str, ...]
    weight: float = 1


def _in(folder: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names)


CASES = {
    "inspect": Case(arguments=("inspect", "q"), files=_in("q", OURS), weight=6),
    "inspect two": Case(arguments=("inspect", "q", "m"), files=_in("q", OURS), weight=2),
    "inspect gguf": Case(arguments=("inspect", "m.gguf"), files=("m.gguf",), weight=3),
    "plan": Case(arguments=("plan", "q"), files=_in("q", OURS), weight=4),
    "plan shape": Case(arguments=("plan", "--shape", "shape.yaml"), files=("shape.yaml",), weight=2),
    "recipes": Case(arguments=("recipes", "check", "recipe.yaml"), files=("recipe.yaml",), weight=4),
    "report": Case(arguments=("report", "q", "-o", "page.html"), files=("q/report.json",), weight=4),
    "report two": Case(arguments=("report", "q", "r", "-o", "page.html"), files=("q/report.json",), weight=2),
    "generate": Case(
        arguments=("generate", "q", "--prompt", "The", "--max-tokens", "4"), files=_in("q", OURS), weight=4
    ),
    "chat": Case(
        arguments=("generate", "c", "--chat", "--prompt", "The", "--max-tokens", "2"),
        files=("c/chat_template.jinja", "c/tokenizer.json", "c/tokenizer_config.json"),
        weight=2,
    ),
    "convert": Case(arguments=("convert", "g", "--to", "awq", "-o", "out"), files=_in("g", OURS), weight=3),
    "convert gguf": Case(arguments=("convert", "g", "--to", "gguf", "-o", "out.gguf"), files=_in("g", OURS), weight=2),
    "quantize": Case(
        arguments=("quantize", "m", "--recipe", "recipe.yaml", "-o", "out"),
        files=(*_in("m", FOLDER), *["recipe.yaml"] * 3),
        weight=2,
    ),
    "quantize data": Case(
        arguments=(
            *("quantize", "m", "--recipe", "gptq-int4", "--calibration", "chats.jsonl", "--samples", "2", "-o", "out"),
        ),
        files=("chats.jsonl",),
    ),
    "resume": Case(
        arguments=("quantize", "m", "--recipe", "rtn-int4", "-o", "half"),
        files=(
            *["half.partial/progress.json"] * 4,
            "half.partial/.quantkit-work",
            "half.partial/checkpoint/*.safetensors",
        ),
        weight=2,
    ),
    "verify": Case(
        arguments=("verify", "q", "--baseline", "m", *VERIFIED, "-o", "out"),
        files=_in("q", OURS),
    ),
    "eval": Case(arguments=("eval", "q", "--window", "32", *SCORED), files=(*_in("q", OURS), "text.txt")),
    "suite": Case(arguments=("eval", "q", "--suite", "suite.yaml", "--limit", "1"), files=("suite.yaml",)),
    "bench": Case(
        arguments=(
            *("bench", "q", "--batch", "1,2", "--prompt-tokens", "8", "--new-tokens", "3", "--requests", "2"),
            *("--threads", "1"),
        ),
        files=_in("q", OURS),
    ),
    "search": Case(
        arguments=(
            *("search", "m", "--recipe", "recipe.yaml", "--bits", "9", "--candidates", "int4:32", "--tokens", "64"),
            *("--text", "text.txt", "-o", "found.yaml"),
        ),
        files=("found.yaml.search/state.json", "found.yaml.search/.quantkit-work", "recipe.yaml"),
    ),
}
TEXT = "The small fox walks along the river and sleeps. " * 40
ASKED = "{limit: 1, perplexity: [{text: text.txt, window: 32, max_windows: 1}]}"
SUITE = f"description: small\ndemo: {ASKED}\nothers: {ASKED}\n"


def main() -> None:
    """Run as many cases as asked, or as fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each has the next")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--commands", default=",".join(CASES), help="names of cases, with commas")
    parser.add_argument("--plant", default="", help=f"defects that runs must find, in turns: {','.join(PLANTS)}")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a run")
    options = parser.parse_args()
    cases, counts, findings = options.commands.split(","), Counter[str](), 0
    plants = itertools.cycle(filter(None, options.plant.split(",")))
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder) / "material"
        prepare(material, cases)
        seeds = range(options.seed, options.seed + options.runs)
        attack = partial(run, material, cases=cases, limit=options.limit, end=end)
        # Forked, so that what is imported is there already; with a limit, as a worker that the kernel kills is waited
        # for without end.
        limits = (resource.RLIMIT_DATA, (4 * LIMIT_BYTES, 4 * LIMIT_BYTES))
        with multiprocessing.get_context("fork").Pool(options.jobs, resource.setrlimit, limits) as pool:
            drawn = zip(seeds, itertools.chain(plants, itertools.repeat(None)), strict=False)
            for done in pool.imap_unordered(attack, drawn):
                if done:
                    counts[f"{done['case']}: {done['code']}"] += 1
                    findings += bool(done["findings"])
                if done.get("findings"):
                    print(json.dumps(done), flush=True)
    print(json.dumps({"runs": counts.total(), "findings": findings, "outcomes": dict(sorted(counts.items()))}))
    sys.exit(1 if findings else 0)


def prepare(material: Path, cases: list[str]) -> None:
    """One of each file that these cases read, made by the commands themselves; heavy imports on the way."""
    import_all()
    from quantkit.demo import DEMO_MODEL

    needed = {word for case in cases for word in (*CASES[case].arguments, *CASES[case].files)}
    material.mkdir()
    shutil.copytree(DEMO_MODEL, material / "m")
    shutil.copytree(DEMO_MODEL, material / "c")
    (material / "c/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    (material / "text.txt").write_text(TEXT)
    (material / "chats.jsonl").write_text("\n".join(map(json.dumps, [{"text": TEXT}, {"input_ids": [1, 2, 3]}] * 2)))
    (material / "suite.yaml").write_text(SUITE)
    config = json.loads((material / "m/config.json").read_text())
    (material / "shape.yaml").write_text(json.dumps({**config, "name": "a shape"}))
    run_command(material, "recipes", "show", "rtn-int4", to="recipe.yaml")
    if needed & {"q", "q/report.json"}:
        run_command(material, *["quantize", "m", "--recipe", "rtn-int4", "-o", "q"])
    if needed & {"g", "m.gguf"}:
        run_command(material, *["quantize", "m", "--recipe", "rtn-int4", "--set", "format=gptq", "-o", "g"])
        run_command(material, *["convert", "g", "--to", "gguf", "-o", "m.gguf"])
    if "q/report.json" in needed:
        run_command(material, *["verify", "q", "--baseline", "m"], *VERIFIED)
        shutil.copytree(material / "q", material / "r")
    if "search" in cases:
        run_command(material, *CASES["search"].arguments, fault="state.json:3")
        assert (material / "found.yaml.search/state.json").exists(), "no interrupted search to go on with"
    if "resume" in cases:
        run_command(material, *CASES["resume"].arguments, fault="progress.json:4")
        assert (material / "half.partial/progress.json").exists(), "no interrupted run to go on with"


def run(material: Path, drawn: tuple[int, str | None], cases: list[str], limit: float, end: float) -> dict[str, Any]:
    """One case: copy, mutate, run, judge. Nothing after the end of the time."""
    if time.monotonic() > end:
        return {}
    seed, plant = drawn
    generator, folder = random.Random(seed), material.with_name(f"run{os.getpid()}")
    name = generator.choices(cases, [CASES[case].weight for case in cases])[0]
    case = CASES[name]
    shutil.rmtree(folder, ignore_errors=True)
    work, mine = folder / "work", folder / "mine"
    _copied(material, work, case)
    (mine / "sub").mkdir(parents=True)
    for path in (mine / "secret.txt", mine / "sub" / "model.safetensors", work / "thesis.txt", work / "out.txt"):
        path.write_text(SECRET)
    changed = [] if plant else [_mutated(work, case, generator, mine) for _ in range(generator.choice([1, 1, 2]))]
    as_json = generator.random() < 0.5 or plant == "json"
    arguments = (*case.arguments, *(["--json"] if as_json else []))
    before = state(folder)
    began = time.monotonic()
    code, peak = supervise(folder, arguments, limit, plant)
    streams = [(folder / stream).read_text(errors="replace") for stream in ("stdout", "stderr")]
    found = [*_judged(code, peak, streams, as_json), *_touched(before, state(folder), name)]
    if any(SECRET in text for text in [*streams, *_written(before, folder)]):
        found.append("the user's file was copied")
    return {
        "seed": seed,
        "case": name,
        "changed": [f"planted: {plant}"] if plant else changed,
        "code": code,
        "seconds": round(time.monotonic() - began, 1),
        "findings": found,
        "stderr": streams[1][-300:] if found else "",
    }


def _copied(material: Path, work: Path, case: Case) -> None:
    """What a case names, and what is small."""
    named = {word.split("/")[0] for word in (*case.arguments, *case.files)}
    work.mkdir(parents=True)
    for path in material.iterdir():
        if path.is_file() and (path.name in named or path.stat().st_size < 1 << 16):
            shutil.copyfile(path, work / path.name)
        elif path.is_dir() and path.name in named:
            shutil.copytree(path, work / path.name, symlinks=True)


def _mutated(work: Path, case: Case, generator: random.Random, mine: Path) -> str:
    name = generator.choice(case.files)
    path = generator.choice(sorted(work.glob(name)) or [work / name]) if "*" in name else work / name
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 1 << 27:
        return f"{name}: changed already"
    return f"{name}: {hostile.mutate(path, generator, mine)}"


def _judged(code: int | None, peak: int, streams: list[str], as_json: bool) -> list[str]:
    stdout, stderr = streams
    found = []
    if code is None:
        found.append("hangs")
    elif code not in EXIT_CODES:
        found.append(f"exit code {code}")
    if "Traceback" in stderr or "this is a bug" in stderr:
        found.append("traceback")
    if peak > LIMIT_BYTES:
        found.append(f"{peak >> 20} MiB of memory")
    errors = [line for line in stderr.splitlines() if line.lower().startswith("error")]
    if code in (3, 4, 5) and not (len(errors) == 1 or (as_json and code == 3)):
        found.append(f"{len(errors)} lines of error")
    if any(len(line) > 3000 or not line.replace("\t", " ").isprintable() for line in errors):
        found.append("an error that cannot be read")
    if as_json and code is not None and code >= 0 and not _is_one_object(stdout):
        found.append("stdout is not one JSON object")
    return found


def _is_one_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def state(folder: Path) -> dict[str, str]:
    """Everything under a folder, read through no link; large and special files by their kind."""
    known = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            what = f"link {path.readlink()}"
        elif path.is_dir():
            what = "folder"
        elif path.is_file() and path.stat().st_size < 1 << 30:
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            what = "special"
        known[str(path.relative_to(folder))] = what
    return known


# What a case may change or make, in the folder where it runs; everything else is the user's.
OUTPUTS = {
    "report": ("page.html",),
    "report two": ("page.html",),
    "convert": ("out", "out.partial"),
    "convert gguf": ("out.gguf", "out.gguf.partial"),
    "quantize": ("out", "out.partial"),
    "quantize data": ("out", "out.partial"),
    "resume": ("half", "half.partial"),
    "verify": ("out",),
    "search": ("found.yaml", "found.yaml.partial", "found.yaml.search"),
}


def _touched(before: dict[str, str], after: dict[str, str], case: str) -> list[str]:
    ours = {f"work/{name}" for name in (*OUTPUTS.get(case, ()), "home")}
    differing = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    foreign = [name for name in differing if "/".join(name.split("/")[:2]) not in {*ours, "stdout", "stderr"}]
    return [f"touched {sorted(foreign)[:3]}"] if foreign else []


def _written(before: dict[str, str], folder: Path) -> list[str]:
    """Contents of new files, as text."""
    paths = (folder / name for name in state(folder) if name not in before)
    return [path.read_bytes().decode("latin-1") for path in paths if path.is_file() and not path.is_symlink()]


if __name__ == "__main__":
    main()
