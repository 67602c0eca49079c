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
    about, settings = kept["about"], kept["settings"]
    positions = range(settings["max_drafts"])
    heads = ["model", "head", *(f"draft {number + 1}" for number in positions), "all", "forced", "chosen"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in kept["rows"]:
        rates = [*row["by_position"], row["acceptance"]]
        cells = [f"{row['model_bits']} bit", f"{row['head_bits']} bit", *(f"{100 * rate:.1f} %" for rate in rates)]
        cells += [f"{row['gain'][name]:.2f}" for name in ("drafted", "chosen")]
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    origin = (
        f"{settings['prompts']} prompts of {settings['prompt_tokens']} tokens, {settings['new_tokens']} new ones each, "
        f"greedy, in float32; commit {about['commit']}, {about['date']}, {versions}, {about['machine']}. "
        "[Script](../evals/mtp/measure_mtp.py)"
    )
    return "\n".join([*lines, "", origin, ""])
