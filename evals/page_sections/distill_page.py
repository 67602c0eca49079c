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

from rows import DISTILLED, MODELS, NUMBERS, Wanted, trained, whole
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
        rows, keys = load_rows(RESULTS / f"{model.name}.json"), [row.key for row in trained(model)]
        for plain, distilled in zip(keys[::2], keys[1::2], strict=True):
            if plain in rows and distilled in rows:
                yield model.folder or model.name, rows[plain], rows[distilled]


def _cells(model: str, plain: Row, distilled: Row) -> tuple[str, ...]:
    wanted = Wanted(
        numbers=distilled.numbers,
        method=DISTILLED,
        symmetric=distilled.symmetric,
        samples=distilled.samples,
        length=distilled.length,
    )
    stale = distilled.taken is None or distilled.taken.changed(whole(wanted, "calibration.jsonl"))
    numbers = NUMBERS[distilled.numbers]
    weights = f"int{numbers.bits} g{numbers.group}" if numbers.group else f"int{numbers.bits} per channel"
    kls = [1000 * sum(row.kl) / len(row.kl) for row in (plain, distilled)]
    perplexities = [math.exp(sum(row.nll) / len(row.nll)) for row in (plain, distilled)]
    return (
        model + (f" {provenance.MARK}" if stale else ""),
        f"{distilled.samples} x {distilled.length}",
        weights + ("" if distilled.symmetric else " asym"),
        *(f"{kl:.4g}" for kl in kls),
        *(f"{perplexity:.4g}" for perplexity in perplexities),
        f"{plain.cpu_s:.0f}, {distilled.cpu_s:.0f}",
        f"{plain.peak_mb}, {distilled.peak_mb}",
    )
