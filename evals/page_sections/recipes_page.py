"""Every shipped recipe on real models, for docs/recipes.md: the rows of accuracy/every_recipe.py; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results/recipes"


def table() -> str:
    """The part of the page."""
    kept = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))}
    rows = {name: {row["recipe"]: row for row in data["rows"]} for name, data in kept.items()}
    lines = [f"| recipe | {' | '.join(rows)} |", "|---" * (len(rows) + 1) + "|"]
    for recipe in sorted({recipe for found in rows.values() for recipe in found}):
        lines.append(f"| {recipe} | {' | '.join(_cell(found.get(recipe)) for found in rows.values())} |")
    measured = "; ".join(
        f"{name}: {_commits(data)}, {data['about']['date']}, {_machines(data)}" for name, data in kept.items()
    )
    note = (
        "`16x256` in a name: calibrated with 16 sequences of 256 tokens instead of the recipe's own number. *worse*: "
        "linears whose error, measured on calibration tokens that were held out, is more than 2 % above that of "
        f"rounding to nearest. KL and the ratio of perplexities are what `quantkit verify` reports for 4k tokens "
        "of WikiText-2; *misses* names gates of the recipe that do not hold. "
        f"{measured}; [script](../evals/accuracy/every_recipe.py)."
    )
    return "\n".join([*lines, "", note, ""])


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    if row["code"]:
        return f"exit code {row['code']}: {row['said'].split(';')[0].removeprefix('error: ')}"
    said = []
    if "kl" in row:
        said.append(f"KL {row['kl']:.2g}, perplexity x {row['perplexity_ratio']:.3f}")
        if row["missed"]:
            said.append(f"**misses {', '.join(re.split('[<>=]', gate)[0] for gate in row['missed'])}**")
    if row["held_out"]:
        said.append(f"{row['worse']} of {row['held_out']} worse")
    return "; ".join(said) or "written"


def _machines(data: dict[str, Any]) -> str:
    return " and ".join(sorted({row["machine"] for row in data["rows"]}))


def _commits(data: dict[str, Any]) -> str:
    names = {row["commit"] for row in data["rows"]}
    return ("commit " if len(names) == 1 else "commits ") + ", ".join(sorted(names))
