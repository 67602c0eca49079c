"""Make the tables of docs/behaviour.md: chat models with fewer bits; for evals/pages.py; standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import provenance

RESULTS = Path(__file__).parents[1] / "results/behaviour"
METHODS = {"rtn": "RTN", "gptq": "GPTQ", "awq": "AWQ"}
RATES = {"unended": "unended", "loop_rate": "loops", "right_format": "right format", "valid_calls": "valid calls"}
LAST = ("tokens per answer", "mean of tasks", "perplexity ratio", "KL on text", "KL on answers")


def table() -> str:
    """Return a table for each model, and what it shows."""
    return "\n\n".join(map(_model, provenance.read_results(RESULTS).values()))


def _model(result: dict[str, Any]) -> str:
    original, counts, rows = result["original"], result["counts"], sorted(result["rows"], key=_order)
    kinds = [kind for kind in _margins(rows[0]) if any(_margins(row)[kind]["ratio"] is not None for row in rows)]
    rates = [name for name in RATES if name in original["rates"]]
    head = ("weights", *(f"margin `{kind}`" for kind in kinds), "flips", *(RATES[name] for name in rates), *LAST)
    acts = [_percent(original["rates"][name]) for name in rates]
    first = ("original", *"1" * len(kinds), "0 %", *acts, f"{original['tokens']:.0f}", _mean(original), *"100")
    made = provenance.table(head, [first, *(_line(row, kinds, rates) for row in rows)])
    commits = ", ".join(sorted({row["stamp"]["commit"] for row in rows}))
    about = (
        f"{result['about']}. Groups of 64; {counts['samples']} calibration sequences; {counts['prompts']} prompts with "
        f"one answer each, at most 128 tokens; {counts['items']} items of each of arc_easy, piqa and winogrande; 4,096 "
        f"tokens of WikiText-2's test text. *: differs from the original (paired, 95 % level). Commits {commits}."
    )
    return "\n".join([made, "", about, "", _finding(rows, kinds, counts["items"])])


def _finding(rows: list[dict[str, Any]], kinds: list[str], items: int) -> str:
    """Say what the sweep shows about margins and tasks."""
    lower = [row for row in rows if any((_margins(row)[kind]["high"] or 1) < 1 for kind in kinds)]
    unseen = [row for row in lower if _verdict(row, "all tasks") != "worse"]
    larger = [row for row in rows if any((_margins(row)[kind]["low"] or 1) > 1 for kind in kinds)]
    return (
        f"In {len(lower)} of {len(rows)} checkpoints a margin is smaller than the original's (95 % interval). In "
        f"{len(unseen)} of these {len(lower)}, {3 * items} items of tasks show no significant loss. In {len(larger)} "
        "checkpoints a margin is larger than the original's."
    )


def _order(row: dict[str, Any]) -> tuple[int, int]:
    method, bits = row["row"].split("-")
    return -int(bits), list(METHODS).index(method)


def _line(row: dict[str, Any], kinds: list[str], rates: list[str]) -> tuple[str, ...]:
    method, bits = row["row"].split("-")
    margins = [_ratio(_margins(row)[kind]) for kind in kinds]
    acts = [_percent(row["rates"][name]) + _mark(row, f"behaviour: {name}") for name in rates]
    tokens = f"{row['tokens']:.0f}" + _mark(row, "answer length: behaviour")
    tasks = _mean(row) + _mark(row, "all tasks")
    perplexity = f"{row['perplexity_ratio']:.3g}" + _mark(row, "perplexity: wikitext2/test.raw.txt")
    figures = (tokens, tasks, perplexity, f"{row['kl']:.3f}", f"{row['kl_of_answers']:.3f}")
    return (f"int{bits}, {METHODS[method]}", *margins, f"{100 * row['flips']:.1f} %", *acts, *figures)


def _percent(rate: float) -> str:
    return f"{100 * rate:.0f} %"


def _ratio(margin: dict[str, Any]) -> str:
    if margin["ratio"] is None:
        return "-"
    return f"{margin['ratio']:.2f} ({margin['low']:.2f} to {margin['high']:.2f})"


def _mean(row: dict[str, Any]) -> str:
    return f"{100 * sum(row['tasks'].values()) / len(row['tasks']):.1f} %"


def _margins(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in row["margins"]}


def _verdict(row: dict[str, Any], subject: str) -> str:
    return next((each["verdict"] for each in row["compared"] if each["subject"] == subject), "")


def _mark(row: dict[str, Any], subject: str) -> str:
    return " *" if _verdict(row, subject) in ("better", "worse") else ""
