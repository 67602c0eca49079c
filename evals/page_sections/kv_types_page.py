"""What each number type of the KV cache costs, for docs/runtime.md; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import table_line

RESULTS = Path(__file__).parents[1] / "results/kv_types"


def table() -> str:
    """The part of the page: a row per model and type."""
    known = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    first = next(iter(known.values()))["rows"][0]["drift"]
    starts = (0, *first["ends"])
    head = ["model", "cache", "size of quantized layers, of 16 bits", "KL, windows of 256"]
    head += [f"tokens {start + 1:,} to {end:,}" for start, end in zip(starts, first["ends"], strict=False)]
    lines = [table_line([*head, "drift per 1,000 tokens"]), "|---" * (len(head) + 1) + "|"]
    rows = [
        (name, row)
        for name, result in known.items()
        for row in sorted(result["rows"], key=lambda row: row["size"], reverse=True)
    ]
    wide = {name: 2 if result["about"]["dtype"] == "torch.float32" else 1 for name, result in known.items()}
    lines += [table_line(_cells(name, row, wide[name])) for name, row in rows]
    said = "; ".join(
        f"{name}: {result['about']['dtype'].removeprefix('torch.')}, commit {result['about']['commit']}, "
        f"{result['about']['machine']}"
        for name, result in known.items()
    )
    growing = [f"{name} with `{row['type']}`" for name, row in rows if row["drift"]["slope_low"] > 0]
    grows = (
        f"KL grows along the texts with {', '.join(growing)}: the whole interval of the drift is above 0."
        if growing
        else "In no row does the KL certainly grow along the texts: no whole interval of the drift is above 0."
    )
    note = f"Mean KL to the same model with a cache in its own dtype, nats. {grows} {said}."
    return "\n".join([*lines, "", note, ""])


def _cells(name: str, row: dict[str, Any], wide: int) -> list[str]:
    """`wide`: size of the model's dtype, in 16 bits."""
    drift = row["drift"]
    between = f"{drift['slope']:.4f} ({drift['slope_low']:.4f} to {drift['slope_high']:.4f})"
    figures = [f"{kl:.2g}" for kl in (row["kl"], *drift["part_kl"])]
    return [name, row["type"], f"1/{1 / row['size'] / wide:.2f}", *figures, between]
