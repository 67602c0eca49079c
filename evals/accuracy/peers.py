"""Measure checkpoints that other tools made, by the same code as ours; kept in results/accuracy/peers-<model>.json.

    python evals/accuracy/peers.py MANIFEST.jsonl --models DIR --data DIR

A line of MANIFEST.jsonl says where a checkpoint is and what it is: {"model": "demo", "path": ..., "tool":
"llm-compressor 0.14.0.1", "method": "GPTQ, mse", "numbers": "w4g32", "symmetric": true, "how": options, "cpu_s": ...,
"peak_mb": ...}. The tools are not needed here, and quantkit does not import them. Lines measured before are skipped.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from pathlib import Path
from typing import Any

from bench import measure, open_bench
from page import PEERS, write_page
from rows import MODELS, Model
from store import RESULTS, load_rows, save_rows

ABOUT = ("tool", "method", "numbers", "symmetric", "how", "cpu_s", "peak_mb")


def key_of(line: dict[str, Any]) -> str:
    """Names a line's row."""
    form = "sym" if line["symmetric"] else "asym"
    return f"{line['numbers']} {line['tool']} {line['method']} {form}"


def run_model(model: Model, lines: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Measure the lines of one model that are not measured yet."""
    path = args.results / f"{PEERS}-{model.name}.json"
    done = load_rows(path)
    todo = [line for line in lines if args.redo or key_of(line) not in done]
    if not todo:
        return
    bench = open_bench(model, args.models, args.data)
    for line in todo:
        about = {key: line[key] for key in ABOUT if key in line}
        asked = fnmatch.fnmatch(f"{model.name} {key_of(line)}", args.tasks)
        row = measure(bench, Path(line["path"]), tasks=asked, **about)
        save_rows(path, load_rows(path) | {key_of(line): row})
        print(f"{model.name} {key_of(line)}: KL {sum(row.kl) / len(row.kl):.5f}", flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--redo", action="store_true")
    parser.add_argument("--tasks", default="", help="pattern of '<model> <key>' that are asked the tasks; '' = none")
    return parser.parse_args()


def main() -> None:
    """All lines, then the page."""
    args = arguments()
    lines = [json.loads(line) for line in args.manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
    for model in MODELS:
        run_model(model, [line for line in lines if line["model"] == model.name], args)
    write_page(args.results)


if __name__ == "__main__":
    main()
