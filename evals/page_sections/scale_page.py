# ruff: noqa: RUF001 - the sign of times is meant
"""Make the measured parts of docs/scale.md from evals/results/scale; for evals/pages.py."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from provenance import MARK, ROOT, digest, module_digest, table

from quantkit.compress.recipe import load, shipped

RESULTS = Path(__file__).resolve().parents[1] / "results/scale"
TALK = "quantkit/distributed/collectives.py"
Row = dict[str, Any]


def code(recipe: Mapping[str, Any]) -> str:
    """Return a digest of a recipe, of the code behind it, and of the collectives between ranks."""
    talk = module_digest(ROOT / TALK)
    return hashlib.sha256(f"{digest(recipe)} {talk}".encode()).hexdigest()[:10]


def row_code(row: Row) -> str:
    """Return `code` of the recipe that a measured row ran; "" for a row without a recipe."""
    return code(load(row["recipe"], row["changes"]).source) if "recipe" in row else ""


def bytes_table() -> str:
    """Return the table of recipes and models: which numbers of ranks and resumed jobs wrote the bytes of one rank."""
    measured: dict[str, Row] = json.loads((RESULTS / "bytes.json").read_text(encoding="utf-8"))
    rows = {key: row for key, row in measured.items() if key.split()[1] in shipped()}  # some are no longer shipped
    models = list(dict.fromkeys(key.split()[0] for key in rows))
    made = table(
        ("Recipe", *models),
        [
            (f"`{recipe}`", *(_cell(rows.get(f"{name} {recipe}"), recipe) for name in models))
            for recipe in sorted({key.split()[1] for key in rows})
        ],
    )
    if stale := made.count(MARK):
        made += f"\n\n{MARK} Measured before the last change of the code that decides the bytes: "
        made += f"{stale} of {len(rows)} cells."
    return f"{made}\n\n{_killed(rows)}"


def _killed(rows: dict[str, Row]) -> str:
    """Say how many jobs were killed, and how soon the other rank ended if there was one."""
    recipes = {key.split()[1] for key in rows}
    killed = {key.split()[1] for key, row in rows.items() if row["killed"]}
    jobs = [(ranks, job["ended_s"]) for row in rows.values() for ranks, job in row["killed"].items()]
    ended = [seconds for ranks, seconds in jobs if not ranks.startswith("1 ")]
    commits = ", ".join(sorted({row["commit"] for row in rows.values()}))
    return (
        f"We killed {len(jobs)} jobs, with {len(killed)} of the {len(recipes)} recipes. In {len(ended)} of these jobs, "
        f"one of two ranks was killed, and the other ended within {max(ended, default=0.0):.1f} s. Commit {commits}."
    )


def _cell(row: Row | None, recipe: str) -> str:
    if row is None:
        return "-"
    first = row["ranks"].get("1")
    said = [count if digest == first else f"**{count} differs**" for count, digest in row["ranks"].items()]
    for ranks, killed in row["killed"].items():
        text = "→".join(ranks.split())
        said.append(text if killed["bytes"] == first else f"**{text} differs**")
    stale = MARK if row["code"] != code(load(recipe, row["changes"]).source) else ""
    return ", ".join(said) + stale


def speed_table() -> str:
    """Return the table that compares several ranks with one."""
    rows = _rows()
    head = ("Work", "Ranks", "Whole, s", "Layers, s", "Speedup, whole", "Speedup, layers")
    head += ("Collectives per rank, share of layers", "Peak MB per rank")
    cells = []
    for row in rows.values():
        one = rows[f"{row['work']} 1"]
        faster = ["", ""] if row is one else [f"{one[key] / row[key]:.2f} ×" for key in ("wall_s", "layers_s")]
        talked = "" if row is one else " · ".join(f"{value / row['layers_s']:.0%}" for value in row["collectives_s"])
        figures = (row["ranks"], f"{row['wall_s']:.1f}", f"{row['layers_s']:.1f}", *faster)
        peaks = " · ".join(map(str, row["peak_mb"]))
        stale = "" if row.get("code", "none kept") == row_code(row) else f" {MARK}"
        cells.append((f"`{row['work']}`{stale}", *figures, talked, peaks))
    made = table(head, cells)
    if MARK in made:
        made += f"\n\n{MARK} Measured before the last change of the code behind this row."
    return f"{made}\n\n{_taken(rows)}"


def _taken(rows: dict[str, Row]) -> str:
    taken = {"{commit}, {date}; {machine}".format_map(row["taken"]) for row in rows.values()}
    return f"Commit {'. Commit '.join(sorted(taken))}."


def _rows() -> dict[str, Row]:
    return json.loads((RESULTS / "ranks.json").read_text(encoding="utf-8"))


def verify_table() -> str:
    """Return the table that compares `verify` on several ranks with one; "" if nothing was measured."""
    file = RESULTS / "verify.json"
    rows: dict[str, Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not rows:
        return ""
    head = ("Ranks", "Whole, s", "Answering, s", "Answers per s of answering", "Answers per s of whole")
    cells = []
    one = rows["verify 1"]
    for row in rows.values():
        rates = [row["answers"] / row[key] for key in ("answering_s", "wall_s")]
        faster = ["", ""] if row is one else [f"{one[key] / row[key]:.2f} ×" for key in ("answering_s", "wall_s")]
        figures = (f"{row['wall_s']:.1f}", f"{row['answering_s']:.1f}", f"{rates[0]:.0f}", f"{rates[1]:.0f}")
        cells.append((row["ranks"], *figures, *faster))
    made = table((*head, "Speedup, answering", "Speedup, whole"), cells)
    equal = "equal" if len({row["digest"] for row in rows.values()}) == 1 else "**different**"
    return f"{made}\n\nThe reports are {equal}, except for times. {_taken(rows)}"
