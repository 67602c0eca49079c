"""Rows of the accuracy table on disk: one JSON file per model, one line per row, written after every row.

A row holds what paired comparisons need: NLL and KL of every block of windows, and the items of every task that were
answered correctly. These items are stored as a hexadecimal number whose lowest bit is item 0.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import Stamp, read_stamp, write_rows

RESULTS = Path(__file__).resolve().parents[1] / "results" / "accuracy"
_DIGITS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The items of a task that were answered correctly.

    Args:
        count: number of items.
        right: hexadecimal number; bit i is set if item i was answered correctly.
    """

    count: int
    right: str

    @property
    def scores(self) -> list[float]:
        """1.0 for each correct item, 0.0 for each wrong one."""
        number = int(self.right, 16)
        return [float(number >> at & 1) for at in range(self.count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One quantized model, or the original, with all its measurements.

    Args:
        tool: quantkit, or a peer with its version.
        method: name of the method within the tool.
        numbers: name of the number type, such as w4g32, w4pc or w8a8.
        symmetric: whether there are no zero points.
        samples, length: number of calibration windows, and tokens in each.
        how: steps of the recipe or options of the tool, as text.
        cpu_s: CPU seconds of the whole process that quantized, with one thread; None = not measured.
        peak_mb: peak memory of this process in MiB.
        others: share of the machine that other processes used meanwhile.
        windows, tokens: number of scored windows and tokens.
        nll, kl: means of each block of windows; see `score.Score`.
        top1: share of positions where the model and the original prefer the same token.
        tasks: answers, keyed by task.
        taken: when, where and with which code the row was measured.
    """

    tool: str
    method: str
    numbers: str
    symmetric: bool
    samples: int = 128
    length: int = 256
    how: str = ""
    cpu_s: float | None = None
    peak_mb: int | None = None
    others: float | None = None
    windows: int
    tokens: int
    nll: tuple[float, ...]
    kl: tuple[float, ...]
    top1: float
    tasks: dict[str, Answers] = field(default_factory=dict)
    taken: Stamp | None = None

    @property
    def has_cost(self) -> bool:
        """Whether the seconds are known and cover a whole process; those of older rows cover a part of it."""
        return self.cpu_s is not None and self.taken is not None and bool(self.taken.machine)


Rows = dict[str, Row]


def pack(right: Sequence[bool]) -> Answers:
    """Return the stored form of the answers to a task, given item by item."""
    return Answers(count=len(right), right=f"{sum(1 << at for at, one in enumerate(right) if one):x}")


def load_rows(path: Path) -> Rows:
    """Return the rows of a file by key; no rows if the file does not exist."""
    if not path.is_file():
        return {}
    return {key: _row(data) for key, data in json.loads(path.read_text(encoding="utf-8")).items()}


def save_rows(path: Path, rows: Rows) -> None:
    """Write a file of rows atomically."""
    write_rows(path, {key: _plain(row) for key, row in rows.items()})


def add_row(path: Path, key: str, row: Row) -> None:
    """Add a row to a file; several processes may do this at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        save_rows(path, load_rows(path) | {key: row})
    finally:
        os.close(folder)


def _row(data: dict[str, Any]) -> Row:
    given = {f.name: data[f.name] for f in fields(Row) if f.name in data}
    tasks = {name: Answers(**answers) for name, answers in data.get("tasks", {}).items()}
    blocks = {key: tuple(data[key]) for key in ("nll", "kl")}
    return Row(**{**given, **blocks, "tasks": tasks, "taken": read_stamp(data.get("taken"))})


def _plain(row: Row) -> dict[str, Any]:
    data = asdict(row)
    for key in ("nll", "kl"):
        data[key] = [float(f"{value:.{_DIGITS}g}") for value in data[key]]
    data["top1"] = round(row.top1, 6)
    return data
