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
        "- Models with `16x256` in the name were calibrated on 16 sequences of 256 tokens; all others, as the "
        "recipe says.\n"
        "- *KL* and *perplexity x* come from `quantkit verify` on 4k tokens of WikiText-2. *perplexity x* is the "
        "perplexity divided by the original's.\n"
        "- *misses* names the gates of the recipe that fail. No tasks were run, so the table leaves out gates on task "
        "scores (`recovery`).\n"
        "- *worse* counts linears whose error on tokens held out from calibration is more than 2 % above the error of "
        "rounding to nearest. In *3 of 126 worse*, 126 is the number of linears that were measured.\n"
        "- *written*, and cells without KL: `quantize` wrote the checkpoint, but `verify` was not run.\n"
        f"{_refusals(kept)}\n"
        "The [script](../evals/accuracy/every_recipe.py) measures these rows."
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
    """Return one line of a list for each recipe that was refused, with the models and the message."""
    models: dict[tuple[str, str], list[str]] = {}
    for name, data in kept.items():
        for row in data["rows"]:
            if row["code"]:
                models.setdefault((row["recipe"], row["said"]), []).append(name)
    return "".join(
        f"- *refused*: `quantize` does not write `{recipe}` for {' and '.join(names)}. Its message: `{said}`.\n"
        for (recipe, said), names in sorted(models.items())
    )


def _machines(data: dict[str, Any]) -> str:
    return "; ".join(sorted({row["machine"].replace("1 cores", "1 core") for row in data["rows"]}))


def _commits(data: dict[str, Any]) -> str:
    return ", ".join(sorted({row["commit"] for row in data["rows"]}))
