"""Make the table of docs/runtime.md on the cost of eviction, from evals/results/eviction; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import provenance

RESULTS = Path(__file__).parents[1] / "results/eviction"
SHARES = (0.5, 0.25, 0.125)
TASKS = {
    ("demo", "recall after"): "recall, asked after",
    ("demo", "recall before"): "recall, asked before",
    ("demo", "perplexity"): "perplexity, demo",
    ("babyllama-361", "perplexity"): "perplexity, babyllama-361",
}
TYPES = {"bf16": "16 bit", "int8": "INT8, keys per token", "int4": "INT4"}
Row = dict[str, Any]


def rows() -> list[Row]:
    """Return our rows and those of the presses.

    Each has a name, `who`, and a `cost`: its bytes, relative to those of all tokens in 16 bits.
    """
    ours, presses = (_read(name)["rows"] for name in ("ours", "presses"))
    full = {(r["model"], r["task"]): r["bytes"] for r in ours if r["policy"] == "full" and r["kv_cache"] == "bf16"}
    for row in ours:
        row |= {
            "who": f"{row['policy']}, {TYPES[row['kv_cache']]}",
            "cost": row["bytes"] / full[row["model"], row["task"]],
        }
    for row in presses:
        row |= {"who": f"{row['press']} (kvpress)", "cost": row["share"]}
    return [*ours, *(row for row in presses if row["press"] != "full")]


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table() -> str:
    """Return the part of the page."""
    known = rows()
    kept = " · ".join(f"{100 * share:g}" for share in SHARES)
    lines = []
    for who in dict.fromkeys(row["who"] for row in known):
        cells = []
        for task in TASKS:
            own = {r["share"]: r["value"] for r in known if r["who"] == who and (r["model"], r["task"]) == task}
            shares = (1.0,) if who.startswith("full") else SHARES
            cells.append(" · ".join(_figure(own.get(share)) for share in shares))
        lines.append([who, *cells])
    cases = " to ".join(map(str, sorted({row["cases"] for row in known})))
    origin = f"Each figure covers {cases} cases. quantkit: {_origin('ours')}. Presses: {_origin('presses')}."
    made = provenance.table([f"Kept: {kept} %", *TASKS.values()], lines)
    return "\n".join([made, "", origin, "", _users(), ""])


def _origin(name: str) -> str:
    """Return the commits of a file's rows, its date and the versions of the packages."""
    about = _read(name)["about"]
    commits = ", ".join(sorted({row["commit"] for row in provenance.known_rows(RESULTS / f"{name}.json")}))
    versions = (f"{which} {version}" for which, version in about["versions"].items())
    return ", ".join([f"commit {commits}", about["date"], *versions])


def _users() -> str:
    """Return the sentence about requests that fit into one pool."""
    kept = _read("users")
    full, evicting = (kept["measured"][name] for name in ("full", "budget"))
    about = kept["about"]
    return (
        f"In a cache pool of {kept['pool']}, with prompts of {kept['prompt']} tokens and {kept['new']} generated "
        f"tokens, the mean number of requests at the same time was {evicting['in_flight']:.1f} with a budget of "
        f"{kept['budget']} and {full['in_flight']:.1f} without a budget. This ratio is {kept['measured_ratio']:.2f}; "
        f"the plan predicted {kept['planned_ratio']:.2f}. The engine generated {evicting['tokens_per_s']:,.0f} tokens "
        f"per second with the budget and {full['tokens_per_s']:,.0f} without it. "
        f"Commit {about['commit']}, {about['date']}, {about['machine']}."
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value <= 1 else f"{value:.3f}"
