"""Make the tables of docs/mtp.md on MTP heads with rounded weights, from evals/results/mtp; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import provenance

RESULTS = Path(__file__).parents[1] / "results/mtp"


def table() -> str:
    """Return the part of the page."""
    kept = _read("acceptance")
    settings, rows = kept["settings"], kept["rows"]
    heads = ["model", "head", *(f"draft {number + 1}" for number in range(settings["max_drafts"])), "all drafts"]
    cells = [
        (f"{row['model_bits']} bit", f"{row['head_bits']} bit", *(f"{100 * rate:.1f} %" for rate in _rates(row)))
        for row in rows
    ]
    drafts = [row["drafts"] for row in rows]
    notes = (
        f"Accepted shares of drafts ({min(drafts):,} to {max(drafts):,} in each row): {settings['prompts']} prompts of "
        f"{settings['prompt_tokens']} tokens, {settings['new_tokens']} new tokens each, greedy, float32. Texts were "
        f"equal with and without drafts in every row, greedy and sampled. {_taken(kept)}."
    )
    return "\n".join([provenance.table(heads, cells), "", notes, "", *_speed(), ""])


def _rates(row: dict[str, Any]) -> list[float]:
    return [*row["by_position"], row["acceptance"]]


def _speed() -> list[str]:
    kept = _read("speed")
    settings = kept["settings"]
    head = ("model", "weights", "acceptance", "without drafts", "with drafts", "gain", "gain if the engine chooses")
    lines = []
    for row in kept["rows"]:
        rates, gains = row["tokens_per_s"], row["gain"]
        cells = (
            row["model"],
            f"{row['weight_bytes'] / 1e6:,.0f} MB",
            f"{100 * row['acceptance']:.1f} %",
            f"{rates['without']:,.0f} tokens/s",
            f"{rates['drafted']:,.0f} tokens/s",
            *("{:.2f} ({:.2f} to {:.2f})".format(*gains[name]) for name in ("drafted", "chosen")),
        )
        lines.append(cells)
    note = (
        f"One sequence at a time, float32, {settings['threads']} thread, {settings['max_drafts']} drafts per step; "
        f"medians of {settings['rounds']} rounds in turns (minimum and maximum in brackets). A head has one layer, so "
        "it costs a third of the model with 3 layers. The model with 10 layers was trained in the same way. `padded` "
        "has more layers, which add zero, and feed-forward channels that no layer reads. It computes the same, but a "
        f"step costs as much as that of a larger model. {_taken(kept)}."
    )
    return [provenance.table(head, lines), "", note]


def _taken(kept: dict[str, Any]) -> str:
    about = kept["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"Commit {about['commit']}, {about['date']}, {versions}, {about['machine']}"


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]
