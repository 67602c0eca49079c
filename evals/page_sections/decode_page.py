"""Make the table of docs/runtime.md on decode steps as one native call and layer by layer; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import provenance

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
    """Return the part of the page: one row per model, number of threads and batch."""
    known = provenance.read_results(RESULTS).values()
    made = provenance.table(HEAD, [_cells(result, row) for result in known for row in result["rows"]])
    commits = ", ".join(sorted({each["taken"]["commit"] for each in known}))
    return f"{made}\n\nBoth ways were measured in turns, on 2 cores. The table shows medians. Commits {commits}."


def _cells(result: dict[str, Any], row: dict[str, Any]) -> tuple[object, ...]:
    _, chip, instructions, _ = result["taken"]["machine"].split(", ")
    before, now = row["layers_ms"], row["program_ms"]
    outside = (f"{100 * row['layers_outside']:.0f} %", f"{100 * row['program_outside']:.1f} %")
    times = (f"{before:.2f} ms", f"{now:.2f} ms", f"{before / now:.2f}", *outside)
    return (f"{chip}, {instructions}", result["model"], row["threads"], row["batch"], row["clock"], *times)
