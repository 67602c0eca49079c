"""KL in llama.cpp itself, against the bf16 original: our K types beside those of llama-quantize with an imatrix.

    gguf_quality.py MODEL --llama BIN --llama-version V --text CALIB.txt --test UNSEEN.txt --about WORDS --work DIR
        -o evals/results/gguf/NAME.json

Both calibrate on the same text, 32 sequences of 512 tokens. BIN is the folder of llama-quantize, llama-imatrix and
llama-perplexity, WORDS say what the model and the test text are. Files that the work folder already has are not made
again; beside each of ours is the stamp of when it was made.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from evals import provenance

ROWS = {"gguf-q2_k": "Q2_K", "gguf-q3_k": "Q3_K_M", "gguf-q4_k": "Q4_K_M", "gguf-q5_k": "Q5_K_M"}
QUANTKIT = [sys.executable, "-m", "quantkit"]
_FIGURES = {
    "kl": r"Mean +KLD: +([\d.]+) ±",
    "kl_error": r"Mean +KLD: +[\d.]+ ± +([\d.]+)",
    "kl_99": r"99\.0% +KLD: +([\d.]+)",
    "perplexity_ratio": r"Mean PPL\(Q\)/PPL\(base\) +: +([\d.]+)",
    "same_top_percent": r"Same top p: +([\d.]+)",
}


def made(file: Path, command: Sequence[object], log: Path | None = None) -> Path:
    """Run a command that makes a file, unless it exists; standard output and error go to `log`."""
    if not file.is_file():
        with (log or file.with_suffix(".log")).open("w") as said:
            subprocess.run([*map(str, command)], stdout=said, stderr=subprocess.STDOUT, check=True)
    return file


def quantized(
    args: argparse.Namespace, name: str, recipe: str, source: dict[str, Any], options: Sequence[object]
) -> dict[str, Any]:
    """Compress the model with a recipe, unless the work folder has its file; its recipe, and the stamp.

    Args:
        args: the model and the work folder.
        name: of the file.
        recipe: its name, or its file.
        source: the fields of the recipe that the stamp is of.
        options: of the command line.
    """
    file, note = args.work / f"{name}.gguf", args.work / f"{name}.json"
    if not file.is_file():
        note.write_text(json.dumps({"recipe": source, "stamp": provenance.plain(provenance.stamp(source))}))
    made(file, [*QUANTKIT, "quantize", args.model, "--recipe", recipe, *options, "-o", file])
    kept: dict[str, Any] = json.loads(note.read_text())
    return kept


def measured(file: Path, args: argparse.Namespace, base: Path) -> dict[str, Any]:
    """Figures of llama-perplexity for a file, against the logits of the original."""
    log = file.with_suffix(".kl")
    command = [args.llama / "llama-perplexity", "-m", file, "-f", args.test, "-c", 512, "--chunks", args.chunks]
    made(log, [*command, "--kl-divergence-base", base, "--kl-divergence", "-t", args.threads], log)
    text = log.read_text(errors="replace")
    found = {name: re.search(pattern, text) for name, pattern in _FIGURES.items()}
    missing = [name for name, match in found.items() if match is None]
    if missing:
        raise SystemExit(f"{log} has no {', '.join(missing)}; delete it and run again")
    return {"bytes": file.stat().st_size, **{name: float(match[1]) for name, match in found.items() if match}}


def main() -> None:
    """Make what is missing, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name in ("--llama", "--text", "--test", "--work", "-o"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    for name in ("--llama-version", "--about"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    original = args.work / "original.gguf"
    made(original, [*QUANTKIT, "convert", args.model, "--to", "gguf", "--type", "bf16", "-o", original])
    base, matrix = args.work / "base.kld", args.work / "imatrix.gguf"
    command = [args.llama / "llama-perplexity", "-m", original, "-f", args.test, "-c", 512, "--chunks", args.chunks]
    made(base, [*command, "--kl-divergence-base", base, "-t", args.threads])
    command = [args.llama / "llama-imatrix", "-m", original, "-f", args.text, "-o", matrix, "-c", 512]
    made(matrix, [*command, "--chunks", 32, "-t", args.threads])
    rows = []
    for recipe in args.rows:
        ours, theirs = args.work / f"{recipe}.gguf", args.work / f"{ROWS[recipe]}.gguf"
        limits = ["--samples", "32", "--sequence-length", "512", "--calibration", args.text]
        plain = yaml.safe_load((provenance.ROOT / "recipes" / f"{recipe}.yaml").read_text())
        stamp = quantized(args, recipe, recipe, plain, limits)["stamp"]
        made(theirs, [args.llama / "llama-quantize", "--imatrix", matrix, original, theirs, ROWS[recipe], args.threads])
        rows += [
            {"by": "quantkit", "name": recipe, **measured(ours, args, base), "stamp": stamp},
            {"by": "llama-quantize", "name": ROWS[recipe], **measured(theirs, args, base),
             "stamp": provenance.plain(provenance.stamp(versions={"llama.cpp": args.llama_version}))},
        ]  # fmt: skip
        about = {"model": args.model.name, "about": args.about, "tokens": 512 * args.chunks // 2}
        texts = provenance.file_digests(calibration=args.text, test=args.test)
        provenance.write_json(args.o, {**about, "texts": texts, "rows": rows})


if __name__ == "__main__":
    main()
