"""Make the tables of docs/recipes.md: every shipped recipe on real models, by every_recipe.py; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import provenance

RESULTS = Path(__file__).parents[1] / "results/recipes"


def table() -> str:
    """Return the part of the page."""
    kept = provenance.read_results(RESULTS)
    rows = {name: {row["recipe"]: row for row in data["rows"]} for name, data in kept.items()}
    recipes = sorted({recipe for found in rows.values() for recipe in found})
    cells = [(recipe, *(_cell(found.get(recipe)) for found in rows.values())) for recipe in recipes]
    note = (
        "*written*: the checkpoint was written, but its quality was not measured. `16x256` in a name: calibrated on "
        "16 sequences of 256 tokens instead of the recipe's own settings. *worse*: linears whose error, measured on "
        "tokens held out from calibration, is more than 2 % above the error of rounding to nearest. KL and the ratio "
        "of perplexities are what `quantkit verify` reports for 4k tokens of WikiText-2; *misses* names gates of the "
        "recipe "
        f"that do not hold. {_refusals(kept)}The [script](../evals/accuracy/every_recipe.py) measures these rows."
    )
    origin = [(name, data["about"]["date"], _commits(data), _machines(data)) for name, data in kept.items()]
    tables = (
        provenance.table(("recipe", *rows), cells),
        provenance.table(("model", "last measured", "commits", "machines"), origin),
    )
    return f"{tables[0]}\n\n{note}\n\n{tables[1]}\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    if row["code"]:
        return f"refused, exit code {row['code']}"
    said = []
    if "kl" in row:
        said.append(f"KL {row['kl']:.2g}, perplexity x {row['perplexity_ratio']:.3f}")
        if row["missed"]:
            said.append(f"**misses {', '.join(re.split('[<>=]', gate)[0] for gate in row['missed'])}**")
    if row["held_out"]:
        said.append(f"{row['worse']} of {row['held_out']} worse")
    return "; ".join(said) or "written"


def _refusals(kept: dict[str, Any]) -> str:
    """Return the messages of refused recipes, each once."""
    said = {
        f"`{row['recipe']}` is refused: {row['said'].split(';')[0].removeprefix('error: ')}. "
        for data in kept.values()
        for row in data["rows"]
        if row["code"]
    }
    return "".join(sorted(said))


def _machines(data: dict[str, Any]) -> str:
    return "; ".join(sorted({row["machine"].replace("1 cores", "1 core") for row in data["rows"]}))


def _commits(data: dict[str, Any]) -> str:
    return ", ".join(sorted({row["commit"] for row in data["rows"]}))
