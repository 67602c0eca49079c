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

from rows import DISTILLED, MODELS, NUMBERS, Model, Wanted, peers_of_trained, trained, whole
from store import RESULTS, Row, load_rows

HEAD = ("model", "weights", "made by", "KL x 1000", "perplexity", "same top token", "CPU s", "peak MB")
NOTE = """\
*KL x 1000* (in nats) and *perplexity* are measured on WikiText-2, as on the page on [accuracy](accuracy.md). All rows
of a model use the same tokens of the bundled text, for GPTQ and for training. *CPU s* is the CPU time of all commands
that made the checkpoint, with one thread. *peak MB* is the peak memory of the last command."""


def table() -> str:
    """Return the part of the page."""
    rows = [row for model in MODELS for row in _rows(model)]
    stamps = sorted({f"commit {row.taken.commit}, {row.taken.machine}" for _, row, _ in rows if row.taken})
    cells = [_cells(*each) for each in rows]
    return f"{provenance.table(HEAD, cells)}\n\n{NOTE} {'; '.join(stamps)}." if rows else "Not measured yet."


def _rows(model: Model) -> Iterator[tuple[Model, Row, bool]]:
    """Yield the measured rows of a model, and whether each is stale: of each number type ours, then another tool's."""
    ours, peers = (load_rows(RESULTS / f"{prefix}{model.name}.json") for prefix in ("", "peers-"))
    for wanted in trained(model):
        if row := ours.get(wanted.key):
            yield model, row, row.taken is None or bool(row.taken.changed(whole(wanted, "calibration.jsonl")))
        if wanted.method == DISTILLED:
            yield from ((model, row, False) for row in peers.values() if _is_beside(model, row, wanted))


def _is_beside(model: Model, row: Row, wanted: Wanted) -> bool:
    tools = {peer.tool for peer, *_ in peers_of_trained(model)}
    same = (row.numbers, row.symmetric) == (wanted.numbers, wanted.symmetric)
    return same and any(row.tool.startswith(tool) for tool in tools)


def _cells(model: Model, row: Row, is_stale: bool) -> tuple[str, ...]:
    numbers, method = NUMBERS[row.numbers], row.method.replace("gptq asymmetric sequential", "GPTQ")
    group = f"g{numbers.group}" if numbers.group else "per channel"
    return (
        f"{model.folder or model.name}, {row.samples} x {row.length}",
        f"int{numbers.bits} {group}{'' if row.symmetric else ' asym'}",
        f"{row.tool}, {method}" + (f" {provenance.MARK}" if is_stale else ""),
        f"{1000 * sum(row.kl) / len(row.kl):.4g}",
        f"{math.exp(sum(row.nll) / len(row.nll)):.4g}",
        f"{100 * row.top1:.1f} %",
        "" if row.cpu_s is None else f"{row.cpu_s:.0f}",
        f"{row.peak_mb}",
    )
