# ruff: noqa: RUF001 - the sign of times is meant
"""What the GPU path is to reach, least and goal, and where in the results of a run each figure is; no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = (
    "machine",
    "smoke",
    "tests",
    "linears",
    "attention",
    "prefill",
    "end_to_end",
    "peer",
    "quantization",
    "greedy",
    "sanitizer",
)
NEAR = ("8192 squared", "8B gate+up", "8B down", "8B qkv", "8B output")
# Who else multiplies the same numbers; the first part of a name that fits.
RIVALS = {
    "w4a16": ("cublas bf16", "torch tinygemm"),
    "w8a8 int8": ("cublas bf16", "torch _int_mm"),
    "w8a8 fp8": ("cublas bf16", "torch _scaled_mm"),
    "": ("cublas bf16",),
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A figure.

    Args:
        value: what was measured; None = nothing.
        peer: how many times as fast as the best of others.
        ceiling: share of the copy bandwidth or of the rate of a large product.
        part: the file it comes from.
    """

    value: float | None = None
    peer: float | None = None
    ceiling: float | None = None
    part: str = ""


@dataclass(frozen=True)
class Item:
    """One line of the goals.

    Args:
        name: of the line.
        least, goal: for `value`; the goal also in words, where it says more.
        measure: finds the figure.
        unit: times, share or minutes.
        at_most: smaller is better.
        in_words: least and goal in words, where they are about more than the value.
    """

    name: str
    least: float
    goal: float
    measure: Callable[[Run], Figure]
    unit: str = "times"
    at_most: bool = False
    in_words: tuple[str, str] | None = None


@dataclass(frozen=True)
class Run:
    """The files of one folder by part."""

    parts: dict[str, dict[str, Any]]

    def rows(self, name: str, /, **labels: Any) -> list[Row]:
        """Measured rows of a part that have these labels."""
        rows = self.parts.get(name, {}).get("rows", [])
        rows = [row for row in rows if "error" not in row and "absent" not in row]
        return [row for row in rows if all(row.get(key) == value for key, value in labels.items())]

    def meta(self, part: str) -> dict[str, Any]:
        """Machine, versions and commit of a part."""
        return dict(self.parts.get(part, {}).get("meta", {}))

    @property
    def has_device(self) -> bool:
        """Whether some part says what it was measured on."""
        return any(part.get("meta", {}).get("device") for part in self.parts.values())

    @property
    def is_rehearsal(self) -> bool:
        """Whether these are no figures of a GPU."""
        return any(part.get("meta", {}).get("rehearsal") for part in self.parts.values())


def read_run(folder: Path) -> Run:
    """What a folder holds."""
    return Run({name: json.loads(path.read_text()) for name in PARTS if (path := folder / f"{name}.json").exists()})


def _linears(kind: str, rows: Callable[[int], bool], shapes: Iterable[str] = NEAR) -> Callable[[Run], Figure]:
    """The worst of a kind over shapes and rows: speedup over bf16, and over the best of others with these bits."""

    def measure(run: Run) -> Figure:
        ours = [row for row in run.rows("linears", kind=kind) if row["shape"] in shapes and rows(row["m"])]
        if not ours:
            return Figure(part="linears")
        peers = [best / row["us"] for row in ours if (best := best_peer(run, row)) is not None]
        ceiling = "share_of_copy" if ours[0]["m"] < 256 else "share_of_gemm"
        return Figure(
            min(row["speedup"] for row in ours),
            min(peers, default=None),
            min(row[ceiling] for row in ours),
            "linears",
        )

    return measure


def best_peer(run: Run, row: Row) -> float | None:
    """Microseconds of the fastest linear of others with the same shape, rows and numbers; None = none was there."""
    rivals = next(names for numbers, names in RIVALS.items() if numbers in row["kind"])
    others = run.rows("linears", shape=row["shape"], m=row["m"])
    return min((other["us"] for other in others if other["kind"] in rivals), default=None)


def _attention(kind: str, key: str, cases: Iterable[tuple[int, int]]) -> Callable[[Run], Figure]:
    """The worst of a KV type over batches and contexts."""

    def measure(run: Run) -> Figure:
        rows = [row for b, c in cases for row in run.rows("attention", kind=kind, batch=b, context=c)]
        rows = [row for row in rows if row.get(key) is not None]
        if not rows:
            return Figure(part="attention")
        peers = []
        for row in rows:
            others = run.rows("attention", batch=row["batch"], context=row["context"])
            times = [other["us"] for other in others if not other["kind"].startswith("quantkit")]
            peers += [min(times) / row["us"]] if times else []
        ceiling = min(row["share_of_copy"] for row in rows)
        return Figure(min(row[key] for row in rows), min(peers, default=None), ceiling, "attention")

    return measure


def step_ms(run: Run, weights: str, kv: str, batch: int, context: int) -> tuple[float, Row] | None:
    """Milliseconds of a decode step, the faster of eager and graph, and its row."""
    rows = run.rows("end_to_end", part="step", weights=weights, kv=kv, batch=batch, context=context)
    if not rows:
        return None
    return min(value for key, value in rows[0].items() if key in ("eager_ms", "graph_ms")), rows[0]


def _step(weights: str, kv: str, batch: int, context: int, against_bf16: bool) -> Callable[[Run], Figure]:
    """A decode step: how many times as fast as the own one in bf16, or its share of the copy bandwidth."""

    def measure(run: Run) -> Figure:
        ours, base = step_ms(run, weights, kv, batch, context), step_ms(run, "bf16", "auto", batch, context)
        if ours is None or base is None:
            return Figure(part="end_to_end")
        peers = [row["step_ms"] for row in run.rows("peer", batch=batch, context=context)]
        peer = min(peers) / ours[0] if peers else None
        share = ours[1]["share_of_copy"]
        return Figure(base[0] / ours[0] if against_bf16 else share, peer, share, "end_to_end")

    return measure


def _host(run: Run) -> Figure:
    rows = [row for row in run.rows("end_to_end", part="engine", batch=32, way="graph, overlap") if "host_share" in row]
    return Figure(max((row["host_share"] for row in rows), default=None), part="end_to_end")


def _gptq(run: Run) -> Figure:
    rows = run.rows("quantization")
    return Figure(rows[0]["model_minutes"] if rows else None, part="quantization")


def _memory(run: Run) -> Figure:
    rows = run.rows("quantization")
    return Figure(rows[0]["peak_device_bytes"] / 1e9 if rows else None, part="quantization")


W4, INT8, FP8 = "quantkit w4a16 g128", "quantkit w8a8 int8", "quantkit w8a8 fp8"
SHORT = ((1, 1024), (1, 2048))
ITEMS = (
    Item("W4A16 g128, M = 1, 8192² and 8B layers", 2.2, 2.8, _linears(W4, lambda m: m == 1)),
    Item(
        "the same, share of copy bandwidth",
        0.45,
        0.6,
        lambda run: Figure(_linears(W4, lambda m: m == 1)(run).ceiling, part="linears"),
        "share",
    ),
    Item("W4A16 g128, M = 16", 2.0, 2.4, _linears(W4, lambda m: m == 16)),
    Item("W4A16 g128, M = 64", 1.3, 1.7, _linears(W4, lambda m: m == 64)),
    Item("W4A16 g128, M from 256 on", 0.95, 1.0, _linears(W4, lambda m: m >= 256)),
    Item("INT8 W8A8, M from 512 on", 1.5, 1.8, _linears(INT8, lambda m: m >= 512)),
    Item("FP8 W8A8, M from 512 on", 1.5, 1.8, _linears(FP8, lambda m: m >= 512)),
    Item(
        "paged decode attention, bf16, 32 × 4k, share of copy bandwidth",
        0.8,
        0.92,
        _attention("quantkit bf16", "share_of_copy", [(32, 4096)]),
        "share",
    ),
    *[
        Item(f"{name} KV against own bf16, 32 × 8k", least, goal, _attention(kind, "speedup_to_own_bf16", [(32, 8192)]))
        for name, kind, least, goal in (
            ("INT8", "quantkit int8", 1.7, 1.9),
            ("FP8", "quantkit fp8", 1.7, 1.9),
            ("INT4", "quantkit int4", 2.2, 3.0),
        )
    ],
    *[
        Item(f"{name} KV at batch 1, up to 2k", 0.95, 1.0, _attention(kind, "speedup_to_own_bf16", SHORT))
        for name, kind in (("INT8", "quantkit int8"), ("FP8", "quantkit fp8"), ("INT4", "quantkit int4"))
    ],
    Item(
        "8B shape, bf16, batch 1 decode, share of copy bandwidth",
        0.7,
        0.85,
        _step("bf16", "auto", 1, 1024, False),
        "share",
    ),
    Item("8B shape, W4 with 8-bit head, batch 1", 2.2, 2.8, _step("w4a16 head8", "auto", 1, 1024, True)),
    Item("8B shape, W4 and INT4 KV, 32 × 8k", 2.2, 3.0, _step("w4a16 head8", "int4", 32, 8192, True)),
    Item("host's share of a batch-32 step", 0.1, 0.01, _host, "share", True, ("< 10 %", "hidden")),
    Item("8B GPTQ g128, 128 × 2048 tokens", 12, 4, _gptq, "minutes", True),
    Item("the same, device memory at its highest", 6, 6, _memory, "GB", True, ("-", "≤ 6 GB")),
)
