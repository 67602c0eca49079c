"""Make the table of docs/distill.md: rows of evals/results/accuracy with and without distillation; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from rows import DISTILLED, MODELS, NUMBERS, SHIPPED, Wanted, forms, whole
from store import RESULTS, Row, load_rows

HEAD = ("model", "calibration", "weights", "KL x 1000", "distilled", "perplexity", "distilled", "CPU s", "peak MB")


def table() -> str:
    """Return the part of the page."""
    found = list(_pairs())
    if not found:
        return "Not measured yet."
    stamps = {f"commit {row.taken.commit}, {row.taken.machine}" for _, _, row in found if row.taken}
    note = (
        "KL x 1000 in nats and perplexity on WikiText-2, as on the page on [accuracy](accuracy.md). GPTQ and training "
        "use the same tokens of the bundled text. CPU s: GPTQ alone, then both commands, with one thread. Peak MB: "
        "GPTQ, then training. "
        f"{'; '.join(sorted(stamps))}."
    )
    return f"{provenance.table(HEAD, [_cells(*each) for each in found])}\n\n{note}"


def _pairs() -> Iterator[tuple[str, Row, Row]]:
    """Yield the model, the row without and the row with distillation."""
    for model in MODELS:
        rows = load_rows(RESULTS / f"{model.name}.json")
        for numbers in model.numbers:
            for form in forms(NUMBERS[numbers]):
                keys = [Wanted(numbers=numbers, method=name, symmetric=form).key for name in (SHIPPED, DISTILLED)]
                if all(key in rows for key in keys):
                    yield model.folder or model.name, rows[keys[0]], rows[keys[1]]


def _cells(model: str, plain: Row, trained: Row) -> tuple[str, ...]:
    wanted = Wanted(
        numbers=trained.numbers,
        method=DISTILLED,
        symmetric=trained.symmetric,
        samples=trained.samples,
        length=trained.length,
    )
    stale = trained.taken is None or trained.taken.changed(whole(wanted, "calibration.jsonl"))
    numbers = NUMBERS[trained.numbers]
    weights = f"int{numbers.bits} g{numbers.group}" if numbers.group else f"int{numbers.bits} per channel"
    kls = [1000 * sum(row.kl) / len(row.kl) for row in (plain, trained)]
    perplexities = [math.exp(sum(row.nll) / len(row.nll)) for row in (plain, trained)]
    return (
        model + (f" {provenance.MARK}" if stale else ""),
        f"{trained.samples} x {trained.length}",
        weights + ("" if trained.symmetric else " asym"),
        *(f"{kl:.4g}" for kl in kls),
        *(f"{perplexity:.4g}" for perplexity in perplexities),
        f"{plain.cpu_s:.0f}, {trained.cpu_s:.0f}",
        f"{plain.peak_mb}, {trained.peak_mb}",
    )
