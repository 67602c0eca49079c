"""The time of a decode step as one native call and layer by layer, for docs/runtime.md; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import table_line

RESULTS = Path(__file__).parents[1] / "results/decode_steps"
HEAD = (
    "machine",
    "model",
    "threads",
    "batch",
    "clock",
    "layer by layer",
    "one call",
    "speedup",
    "time outside kernels: layer by layer",
    "one call",
)


def table() -> str:
    """The part of the page: a row per model, number of threads and batch."""
    known = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    lines = [table_line(HEAD), "|---" * len(HEAD) + "|"]
    lines += [_line(result, row) for result in known for row in result["rows"]]
    commits = sorted({each["taken"]["commit"] for each in known})
    return "\n".join(
        [
            *lines,
            "",
            f"Both ways were measured in turns, on 2 cores. The table shows medians. Commits {', '.join(commits)}.",
        ]
    )


def _line(result: dict[str, Any], row: dict[str, Any]) -> str:
    _, chip, instructions, _ = result["taken"]["machine"].split(", ")
    before, now = row["layers_ms"], row["program_ms"]
    outside = (f"{100 * row['layers_outside']:.0f} %", f"{100 * row['program_outside']:.1f} %")
    times = (f"{before:.2f} ms", f"{now:.2f} ms", f"{before / now:.2f}", *outside)
    return table_line((f"{chip}, {instructions}", result["model"], row["threads"], row["batch"], row["clock"], *times))
