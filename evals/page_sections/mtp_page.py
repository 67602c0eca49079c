"""Acceptance of an MTP head with rounded weights, for docs/mtp.md: the table of evals/results/mtp; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path

RESULT = Path(__file__).parents[1] / "results/mtp/acceptance.json"


def table() -> str:
    """The part of the page."""
    kept = json.loads(RESULT.read_text(encoding="utf-8"))
    about, settings, rows = kept["about"], kept["settings"], kept["rows"]
    heads = ["model", "head", *(f"draft {number + 1}" for number in range(settings["max_drafts"])), "all drafts"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        rates = (f"{100 * rate:.1f} %" for rate in (*row["by_position"], row["acceptance"]))
        lines.append(f"| {row['model_bits']} bit | {row['head_bits']} bit | {' | '.join(rates)} |")
    drafts, gains = (
        [of(row) for row in rows] for of in (lambda row: row["drafts"], lambda row: row["gain"]["drafted"])
    )
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    taken = f"Commit {about['commit']}, {about['date']}, {versions}, {about['machine']}"
    notes = (
        f"Accepted shares of {min(drafts):,} to {max(drafts):,} drafts per row: {settings['prompts']} prompts of "
        f"{settings['prompt_tokens']} tokens, {settings['new_tokens']} new tokens each, greedy, float32. Texts were "
        "equal with and without drafts in every row, greedy and sampled. "
        f"{taken}; [script](../evals/mtp/measure_mtp.py).",
        f"With drafts, one sequence on one thread decoded {min(gains):.2f} to {max(gains):.2f} times as many tokens "
        "per CPU second as without. The machine was busy, so this shows neither a gain nor a loss. This model has 3 "
        "layers, beside which its head costs much, and Python takes a large part of each step: expect other speeds "
        "of a large model.",
    )
    return "\n".join([*lines, "", notes[0], "", notes[1], ""])
