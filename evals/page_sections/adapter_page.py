"""Merging an adapter before quantizing, or applying it afterwards, for docs/adapters.md; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results/adapter"


def table() -> str:
    """The part of the page."""
    return "\n".join(_table(file) for file in sorted(RESULTS.glob("*.json")))


def _table(file: Path) -> str:
    kept = json.loads(file.read_text(encoding="utf-8"))
    about, rows = kept["about"], kept["rows"]
    adapter, training = about["adapter"], about["adapter"]["training"]
    lines = ["| recipe | merged, then quantized | quantized, then applied | difference |", "|---|---|---|---|"]
    for row in rows:
        cells = (_kl(row[key]) for key in ("merged, then quantized", "quantized, then applied", "difference"))
        lines.append(f"| {row['recipe']} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    distance = about["largest logit difference from transformers + PEFT"]
    note = (
        f"KL x 1000 with 95 % intervals, of {file.stem} with an adapter on all linears: rank {adapter['r']}, trained "
        f"for {training['steps']} steps of {training['batch']} x {training['length']} tokens of {training['text']}. "
        f"{about['windows']} windows of {about['text']}, {about['tokens']:,} tokens; calibration: "
        f"{about['calibration']}. The base without the adapter has {_kl(about['kl of the base without the adapter'])}. "
        f"Logits of the original with the adapter, in float32, differ from those of transformers + PEFT by at most "
        f"{distance:.1e}. Commit {about['commit']}, {about['date']}, {versions}, {about['machine']}."
    )
    return "\n".join([*lines, "", note, ""])


def _kl(value: Sequence[float]) -> str:
    mean, low, high = (1000 * one for one in value)
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"
