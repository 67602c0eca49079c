"""How chat models act as their weights lose bits, for docs/behaviour.md; for evals/pages.py. Standard library only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import table_line

RESULTS = Path(__file__).parents[1] / "results/behaviour"
METHODS = {"rtn": "RTN", "gptq": "GPTQ", "awq": "AWQ"}
HEAD = (
    *("weights", "margin of ending the turn", "flips", "unended", "loops", "right format", "tokens per answer"),
    *("mean of tasks", "perplexity ratio", "KL on text", "KL on answers"),
)


def table() -> str:
    """A table per model, and what each shows."""
    return "\n\n".join(_model(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(RESULTS.glob("*.json")))


def _model(result: dict[str, Any]) -> str:
    original, counts, rows = result["original"], result["counts"], sorted(result["rows"], key=_order)
    first = ("original", "1", "0 %", *_acts(original), _mean(original), "1", "0", "0")
    lines = [table_line(HEAD), "|---" * len(HEAD) + "|", table_line(first), *map(_line, rows)]
    commits = ", ".join(sorted({row["stamp"]["commit"] for row in rows}))
    about = (
        f"{result['about']}. Groups of 64; {counts['samples']} calibration sequences; {counts['prompts']} prompts with "
        f"one answer each, at most 128 tokens; {counts['items']} items of each of arc_easy, piqa and winogrande; 4,096 "
        f"tokens of WikiText-2's test text. *: differs from the original (95 %, paired). Commits {commits}."
    )
    return "\n".join([*lines, "", about, "", _finding(rows, counts["items"])])


def _finding(rows: list[dict[str, Any]], items: int) -> str:
    """What the sweep says about margins and tasks."""
    lower = [row for row in rows if (end := _end(row)) and end["high"] is not None and end["high"] < 1]
    unseen = [row for row in lower if _verdict(row, "all tasks") != "worse"]
    return (
        f"In {len(lower)} of {len(rows)} checkpoints the margin of ending the turn is smaller than the original's. In "
        f"{len(unseen)} of these {len(lower)}, {3 * items} items of tasks show no significant loss."
        if lower
        else "In no checkpoint is the margin of ending the turn smaller than the original's."
    )


def _order(row: dict[str, Any]) -> tuple[int, int]:
    method, bits = row["row"].split("-")
    return -int(bits), list(METHODS).index(method)


def _line(row: dict[str, Any]) -> str:
    method, bits = row["row"].split("-")
    end = _end(row)
    margin = (
        "-" if end is None or end["ratio"] is None else f"{end['ratio']:.2f} ({end['low']:.2f} to {end['high']:.2f})"
    )
    marks = [_mark(row, f"behaviour: {name}") for name in ("unended", "loop_rate", "right_format")]
    acts = [
        f"{text}{mark}" for text, mark in zip(_acts(row), [*marks, _mark(row, "answer length: behaviour")], strict=True)
    ]
    tasks = _mean(row) + _mark(row, "all tasks")
    perplexity = f"{row['perplexity_ratio']:.3g}" + _mark(row, "perplexity: wikitext2/test.raw.txt")
    figures = (perplexity, f"{row['kl']:.3f}", f"{row['kl_of_answers']:.3f}")
    return table_line((f"int{bits}, {METHODS[method]}", margin, f"{100 * row['flips']:.1f} %", *acts, tasks, *figures))


def _acts(row: dict[str, Any]) -> list[str]:
    rates = [f"{100 * row['rates'][name]:.0f} %" for name in ("unended", "loop_rate", "right_format")]
    return [*rates, f"{row['tokens']:.0f}"]


def _mean(row: dict[str, Any]) -> str:
    return f"{100 * sum(row['tasks'].values()) / len(row['tasks']):.1f} %"


def _end(row: dict[str, Any]) -> dict[str, Any] | None:
    return next((each for each in row["margins"] if each["kind"] == "end"), None)


def _verdict(row: dict[str, Any], subject: str) -> str:
    return next((each["verdict"] for each in row["compared"] if each["subject"] == subject), "")


def _mark(row: dict[str, Any], subject: str) -> str:
    return " *" if _verdict(row, subject) in ("better", "worse") else ""
