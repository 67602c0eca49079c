"""Quality of our GGUF files beside those of llama-quantize, and of searched ones beside others of their size, for
docs/gguf.md: the tables of evals/results/gguf.

Standard library and yaml; for evals/pages.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import MARK, ROOT, read_stamp

SEARCHES = "search-"  # files of gguf_search.py
RESULTS = Path(__file__).parents[1] / "results/gguf"


def table() -> str:
    """The part of the page about quality."""
    files = sorted(path for path in RESULTS.glob("*.json") if not path.name.startswith(SEARCHES))
    return "\n\n".join(_of(json.loads(path.read_text(encoding="utf-8"))) for path in files)


def searched() -> str:
    """The part of the page about searches."""
    files = sorted(RESULTS.glob(f"{SEARCHES}*.json"))
    return "\n\n".join(_of_search(json.loads(path.read_text(encoding="utf-8"))) for path in files)


def _of_search(result: dict[str, Any]) -> str:
    lines = [
        "| File | types | MB | KL | 99 % below | same likeliest token |",
        "|---|---|---|---|---|---|",
    ]
    commits = set()
    for row in result["rows"]:
        stamp = read_stamp(row["stamp"])
        assert stamp is not None, row["name"]
        mark = f" {MARK}" if stamp.changed(row["recipe"]) else ""
        commits.add(stamp.commit)
        cells = [row["kind"], f"{row['bytes'] / 1e6:.1f}", f"{row['kl']:.4f} ± {row['kl_error']:.4f}{mark}"]
        cells += [f"{row['kl_99']:.2f}", f"{row['same_top_percent']:.1f} %"]
        lines.append(f"| `{row['name']}` | " + " | ".join(cells) + " |")
    lines += ["", f"{result['model']}: {result['about']}; {result['rows'][0]['positions']:,} tokens, measured by"]
    lines[-1] += f" {result['engine']}. Each search had {result['tokens']} tokens and the candidates"
    lines[-1] += f" {result['candidates']}. At commit {', '.join(sorted(commits))}."
    return "\n".join(lines)


def _of(result: dict[str, Any]) -> str:
    lines = [
        "| File | made by | MB | KL | KL, 99th percentile | perplexity / original's | same top token |",
        "|---|---|---|---|---|---|---|",
    ]
    commits, versions = set(), set()
    for row in result["rows"]:
        stamp = read_stamp(row["stamp"])
        assert stamp is not None, row["name"]
        ours, mark = row["by"] == "quantkit", ""
        if ours:
            recipe = yaml.safe_load((ROOT / "recipes" / f"{row['name']}.yaml").read_text(encoding="utf-8"))
            mark = f" {MARK}" if stamp.changed(recipe) else ""
            commits.add(stamp.commit)
        else:
            versions |= {f"{name} {version}" for name, version in stamp.versions.items()}
        cells = [f"{row['bytes'] / 1e6:.1f}", f"{row['kl']:.3f} ± {row['kl_error']:.3f}{mark}", f"{row['kl_99']:.2f}"]
        cells += [f"{row['perplexity_ratio']:.3f}", f"{row['same_top_percent']:.1f} %"]
        lines.append(f"| `{row['name']}` | {row['by']} | " + " | ".join(cells) + " |")
    lines += ["", f"{result['model']}: {result['about']}; {result['tokens']:,} tokens. Files of llama-quantize have"]
    lines[-1] += f" llama.cpp's own imatrix ({', '.join(sorted(versions))})."
    lines[-1] += f" Ours at commit {', '.join(sorted(commits))}."
    return "\n".join(lines)
