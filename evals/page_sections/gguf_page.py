"""Make the tables of docs/gguf.md from evals/results/gguf, for evals/pages.py; standard library and yaml.

They compare the quality of our GGUF files with those of llama-quantize, and searched files with others of their size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import provenance
import yaml

SEARCHES = "search-"  # files of gguf_search.py
RESULTS = Path(__file__).parents[1] / "results/gguf"


def table() -> str:
    """Return the part of the page about quality."""
    known = provenance.read_results(RESULTS)
    return "\n\n".join(_of(result) for name, result in known.items() if not name.startswith(SEARCHES))


def searched() -> str:
    """Return the part of the page about searches."""
    return "\n\n".join(map(_of_search, provenance.read_results(RESULTS, f"{SEARCHES}*.json").values()))


def _of_search(result: dict[str, Any]) -> str:
    rows, commits = [], set()
    for row in result["rows"]:
        stamp = provenance.Stamp(**row["stamp"])
        mark = f" {provenance.MARK}" if stamp.changed(row["recipe"]) else ""
        commits.add(stamp.commit)
        cells = [row["kind"], f"{row['bytes'] / 1e6:.1f}", f"{row['kl']:.4f} ± {row['kl_error']:.4f}{mark}"]
        rows.append([f"`{row['name']}`", *cells, f"{row['kl_99']:.2f}", f"{row['same_top_percent']:.1f} %"])
    made = provenance.table(("File", "types", "MB", "KL", "KL, 99th percentile", "same top token"), rows)
    return (
        f"{made}\n\n{result['model']}: {result['about']}; {result['rows'][0]['positions']:,} tokens, measured by "
        f"{result['engine']}. Each search used {result['tokens']} tokens to choose, and the "
        f"candidates {result['candidates']}. "
        f"At commit {', '.join(sorted(commits))}."
    )


def _of(result: dict[str, Any]) -> str:
    rows, commits, versions = [], set(), set()
    for row in result["rows"]:
        stamp = provenance.Stamp(**row["stamp"])
        ours, mark = row["by"] == "quantkit", ""
        if ours:
            recipe = yaml.safe_load((provenance.ROOT / "recipes" / f"{row['name']}.yaml").read_text(encoding="utf-8"))
            mark = f" {provenance.MARK}" if stamp.changed(recipe) else ""
            commits.add(stamp.commit)
        else:
            versions |= {f"{name} {version}" for name, version in stamp.versions.items()}
        cells = [f"{row['bytes'] / 1e6:.1f}", f"{row['kl']:.3f} ± {row['kl_error']:.3f}{mark}", f"{row['kl_99']:.2f}"]
        cells += [f"{row['perplexity_ratio']:.3f}", f"{row['same_top_percent']:.1f} %"]
        rows.append([f"`{row['name']}`", row["by"], *cells])
    head = ("File", "made by", "MB", "KL", "KL, 99th percentile", "perplexity / original's", "same top token")
    return (
        f"{provenance.table(head, rows)}\n\n{result['model']}: {result['about']}; {result['tokens']:,} tokens. "
        f"llama-quantize used an importance matrix made by llama.cpp ({', '.join(sorted(versions))}). "
        f"Files of quantkit were made at commit {', '.join(sorted(commits))}."
    )
