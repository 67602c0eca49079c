"""Make the table of docs/adapters.md: adapters merged before quantizing or applied afterwards; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import provenance

RESULTS = Path(__file__).parents[1] / "results/adapter"


def table() -> str:
    """Return the part of the page."""
    return "\n".join(_table(name, kept) for name, kept in provenance.read_results(RESULTS).items())


def _table(name: str, kept: dict[str, Any]) -> str:
    about, rows = kept["about"], kept["rows"]
    adapter, training = about["adapter"], about["adapter"]["training"]
    keys = ("merged, then quantized", "quantized, then applied", "difference")
    cells = [(row["recipe"], *(_kl(row[key]) for key in keys)) for row in rows]
    versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
    distance = about["largest logit difference from transformers + PEFT"]
    note = (
        f"KL x 1000 with 95 % intervals, for {name} with an adapter on all linears: rank {adapter['r']}, trained "
        f"for {training['steps']} steps of {training['batch']} x {training['length']} tokens of {training['text']}. "
        f"{about['windows']} windows of {about['text']}, {about['tokens']:,} tokens; calibration: "
        f"{about['calibration']}. The base without the adapter has {_kl(about['kl of the base without the adapter'])}. "
        f"Logits of the original with the adapter, in float32, differ from those of transformers + PEFT by at most "
        f"{distance:.1e}. Commit {about['commit']}, {about['date']}, {versions}, {about['machine']}."
    )
    return "\n".join([provenance.table(("recipe", *keys), cells), "", note, ""])


def _kl(value: Sequence[float]) -> str:
    mean, low, high = (1000 * one for one in value)
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"
