"""KL of searched GGUF files beside files of the same size with one type for all tensors, or with a shipped mix.

    gguf_search.py MODEL --calibration CALIB.txt --text UNSEEN.txt --test TEST.txt --about WORDS --work DIR
        -o evals/results/gguf/search-NAME.json

All calibrate on the same text. The search measures on UNSEEN. Every file is then measured on the beginning of TEST,
which neither saw, by quantkit's engine in float32. For each size, the searched file is at most as large as the first
of the others, and these are within 1 % of one another. Files that the work folder has are not made again;
beside each is its row, with the stamp of when it was made.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from gguf_quality import QUANTKIT, made, quantized

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from evals import provenance

# Recipe and changed fields of the files that a searched one is compared with; the first gives the size.
SIZES: dict[str, list[tuple[str, list[str]]]] = {
    "uniform-q4_1": [
        ("gguf-q4_k", ["overrides=[]", "weights.dtype=q4_1", "embedding=q5_k", "name=uniform-q4_1"]),
    ],
    "gguf-q3_k": [
        ("gguf-q3_k", []),
        ("gguf-q4_k", ["overrides=[]", "embedding=q5_k", "name=uniform-q4_k"]),
    ],
    "gguf-q4_k": [
        ("gguf-q4_k", []),
        ("gguf-q5_k", ["overrides=[]", "name=uniform-q5_k"]),
    ],
}


def settings(changes: list[str]) -> list[str]:
    """The changes as words of a command line."""
    return [word for change in changes for word in ("--set", change)]


def row_of(args: argparse.Namespace, name: str, recipe: str, changes: list[str]) -> dict[str, Any]:
    """Compress the model with a recipe, unless the file exists; return the file's row without its KL."""
    from quantkit.compress.recipe import load

    changes = [*changes, f"calibration.data={args.calibration}", f"calibration.samples={args.samples}"]
    source = load(recipe, changes).source
    source["calibration"] = {**source["calibration"], "data": args.calibration.name}
    # A searched recipe rests on the code of the search too.
    source |= {"search": True} if recipe.endswith(".yaml") else {}
    kept = quantized(args, name, recipe, source, settings(changes))
    return {"name": name, **kept, "bytes": (args.work / f"{name}.gguf").stat().st_size}


def search(args: argparse.Namespace, num_bytes: int, name: str) -> Path:
    """Search a recipe for a size, unless its file exists."""
    file: Path = args.work / f"{name}.yaml"
    changes = settings([f"calibration.data={args.calibration}", f"calibration.samples={args.samples}"])
    options = ["--text", args.text, "--tokens", args.tokens, "--rounds", args.rounds, *changes]
    options += ["--candidates", args.candidates, "--work", args.work / "trials", "--threads", 1]
    command = [*QUANTKIT, "search", args.model, "--format", "gguf", "--size", num_bytes, *options, "-o", file]
    return made(file, command, file.with_suffix(".search.log"))


def measure(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Add the KL to the original on the test text to each row."""
    from quantkit.evaluate.fidelity import fixed_windows
    from quantkit.evaluate.loading import load_llm
    from quantkit.evaluate.sensitivity import Probe

    engine = {"dtype": "float32", "device": "cpu", "threads": 1}
    original = load_llm(str(args.model), **engine)
    probe = Probe(original, fixed_windows(original, args.test.read_text(encoding="utf-8"), max_tokens=args.test_tokens))
    for row in rows:
        found = probe.compare(load_llm(str(args.work / f"{row['name']}.gguf"), **engine))
        error = float(found.kl.double().std()) / len(found.kl) ** 0.5
        row |= {"kl": found.mean, "kl_error": error, "kl_99": found.p99, "same_top_percent": 100 * found.top1}
        row["positions"] = len(found.kl)
        print(row["name"], row["bytes"], found.mean, error, flush=True)


def main() -> None:
    """Make what is missing, measure it, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name in ("--calibration", "--text", "--test", "--work", "-o"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--about", required=True)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--candidates", default="q3_k,q4_k,q4_1,q5_k,q6_k")
    for name, number in (("--samples", 16), ("--tokens", 512), ("--rounds", 0), ("--test-tokens", 4096)):
        parser.add_argument(name, type=int, default=number)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for first in args.sizes:
        for recipe, changes in SIZES[first]:
            name = next((change.partition("=")[2] for change in changes if change.startswith("name=")), recipe)
            kind = "one type" if changes else "shipped mix"
            rows.append({**row_of(args, name, recipe, changes), "kind": kind, "size_of": first})
        found = search(args, (args.work / f"{first}.gguf").stat().st_size, f"searched-{first}")
        row = {**row_of(args, found.stem, str(found), []), "kind": "searched", "size_of": first}
        rows.append({**row, "measured": yaml.safe_load(found.read_text(encoding="utf-8"))["measured"]})
    measure(args, rows)
    texts = provenance.file_digests(calibration=args.calibration, text=args.text, test=args.test)
    keys = ("candidates", "samples", "tokens", "rounds", "about")
    engine = "quantkit's own engine, float32; not llama.cpp, which was not built"
    result = {"model": args.model.name, "engine": engine, **{key: getattr(args, key) for key in keys}}
    provenance.write_json(args.o, {**result, "texts": texts, "rows": rows})


if __name__ == "__main__":
    main()
