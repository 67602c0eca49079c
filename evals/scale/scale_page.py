# ruff: noqa: RUF001 - the sign of times is meant
"""The measured parts of docs/scale.md, of evals/results/scale; for evals/pages.py."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import MARK, code_digest, digest, source

from quantkit.compress.recipe import load

RESULTS = Path(__file__).resolve().parents[1] / "results/scale"
KILLED = ((1, 2), (2, 1))  # ranks of the job that is killed, and of the one that ends it
LINKS = {"10 Gb/s": 1.25e9, "100 Gb/s": 12.5e9}  # bytes per second each way, as given
LOOPBACK = 1.5e9  # between two ranks of this machine, assumed
COUNTS = [2**power for power in range(8)]
WORTH = 1.3  # times as fast, for twice the ranks
OLDER = (
    "They are older than the seconds measured here, so of other code: compare factors, not seconds; the hours are\n"
    "of that code too."
)
TALK = ("quantkit.distributed.collectives", "quantkit.distributed.shared_memory")
Row = dict[str, Any]


def code(recipe: Mapping[str, Any]) -> str:
    """Digest of a recipe, of the code behind it, and of how ranks talk."""
    files = map(source, TALK)
    talk = " ".join(code_digest(ast.parse(file.read_text(encoding="utf-8"))) for file in files if file is not None)
    return hashlib.sha256(f"{digest(recipe)} {talk}".encode()).hexdigest()[:10]


def row_code(row: Row) -> str:
    """As `code`, of what a row of `measure_scale.py` ran; empty for one that does not say what that was."""
    return code(load(row["recipe"], row["changes"]).source) if "recipe" in row else ""


def is_same(row: Row) -> bool:
    """Whether all runs of one recipe on one model wrote the same bytes."""
    digests = {*row["ranks"].values(), *(killed["bytes"] for killed in row["killed"].values())}
    return len(digests) <= 1 and not any(digest.startswith("exit") for digest in digests)


def bytes_table() -> str:
    """Recipes by models: which numbers of ranks wrote the bytes of one, and which killed jobs others ended so."""
    rows: dict[str, Row] = json.loads((RESULTS / "bytes.json").read_text(encoding="utf-8"))
    models = list(dict.fromkeys(key.split()[0] for key in rows))
    lines = [f"| Recipe | {' | '.join(models)} |", "|---" * (1 + len(models)) + "|"]
    for recipe in sorted({key.split()[1] for key in rows}):
        lines.append(
            f"| `{recipe}` | " + " | ".join(_cell(rows.get(f"{name} {recipe}"), recipe) for name in models) + " |"
        )
    stale = "\n".join(lines).count(MARK)
    lines += ["", f"{MARK} Before the last change of what decides bytes: {stale} of {len(rows)} cells."] * bool(stale)
    return "\n".join([*lines, "", _killed(rows)])


def _killed(rows: dict[str, Row]) -> str:
    """Which jobs were killed, and how soon other ranks, where there were any, had ended."""
    recipes = {key.split()[1] for key in rows}
    killed = {key.split()[1] for key, row in rows.items() if row["killed"]}
    jobs = [(ranks, job["ended_s"]) for row in rows.values() for ranks, job in row["killed"].items()]
    ended = [seconds for ranks, seconds in jobs if not ranks.startswith("1 ")]
    commits = ", ".join(sorted({row["commit"] for row in rows.values()}))
    return (
        f"{len(jobs)} jobs of {len(killed)} of the {len(recipes)} recipes were killed. Of {len(ended)} with two "
        f"ranks the other one ended within {max(ended, default=0.0):.1f} s. Commit {commits}."
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
    """Several ranks beside one, as measured."""
    rows = _rows()
    lines = [
        "| Work | Ranks | Whole, s | Layers, s | Faster: whole | layers | In collectives | Peak MB per rank |",
        "|---" * 8 + "|",
    ]
    for row in rows.values():
        one = rows[f"{row['work']} 1"]
        faster = ["", ""] if row is one else [f"{one[key] / row[key]:.2f} ×" for key in ("wall_s", "layers_s")]
        talked = "" if row is one else " · ".join(f"{value / row['layers_s']:.0%}" for value in row["collectives_s"])
        figures = f"{row['ranks']} | {row['wall_s']:.1f} | {row['layers_s']:.1f} | {' | '.join(faster)}"
        peaks = " · ".join(map(str, row["peak_mb"]))
        stale = "" if row.get("code", "none kept") == row_code(row) else f" {MARK}"
        lines.append(f"| `{row['work']}`{stale} | {figures} | {talked} | {peaks} |")
    taken = {"{commit}, {date}; {machine}".format_map(row["taken"]) for row in rows.values()}
    lines += ["", f"{MARK} Before the last change of the code behind it."] * (MARK in "".join(lines))
    lines += ["", f"Commit {'. Commit '.join(sorted(taken))}.", ""]
    machine: Row = json.loads((RESULTS / "two_processes.json").read_text(encoding="utf-8"))
    gains = {name: sum(each[name] for each in machine["two"]) / rate for name, rate in machine["one"][0].items()}
    listed = ", ".join(f"{name} {gain:.2f} ×" for name, gain in gains.items())
    lines.append(
        "Two processes of one thread each that have nothing to do with each other do, together and to one alone,"
    )
    own = {row["taken"]["machine"] for row in rows.values()}
    where = "" if own == {machine["taken"]["machine"]} else f" on another machine, {machine['taken']['machine']}"
    return "\n".join([*lines, f"{listed}{where} (`evals/scale/two_processes.py`)."])


def _rows() -> dict[str, Row]:
    rows: dict[str, Row] = json.loads((RESULTS / "ranks.json").read_text(encoding="utf-8"))
    return rows


def verify_table() -> str:
    """Several ranks that verify beside one, as measured; nothing before that has been."""
    file = RESULTS / "verify.json"
    rows: dict[str, Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not rows:
        return ""
    lines = [
        "| Ranks | Whole, s | Answering, s | Answers per s, answering | of the whole | Faster: answering | whole |",
        "|---" * 7 + "|",
    ]
    one = rows["verify 1"]
    for row in rows.values():
        rates = [row["answers"] / row[key] for key in ("answering_s", "wall_s")]
        faster = ["", ""] if row is one else [f"{one[key] / row[key]:.2f} ×" for key in ("answering_s", "wall_s")]
        figures = f"{row['wall_s']:.1f} | {row['answering_s']:.1f} | {rates[0]:.0f} | {rates[1]:.0f}"
        lines.append(f"| {row['ranks']} | {figures} | {' | '.join(faster)} |")
    taken = {"{commit}, {date}; {machine}".format_map(row["taken"]) for row in rows.values()}
    equal = "equal" if len({row["digest"] for row in rows.values()}) == 1 else "**different**"
    return "\n".join([*lines, "", f"The reports are {equal}, but for times. Commit {'. Commit '.join(sorted(taken))}."])


def prediction() -> str:
    """Of more ranks than there were, with what it is made of, and how far it is from two that ran."""
    import predict

    kept = json.loads(predict.FILE.read_text(encoding="utf-8"))
    pieces, taken = kept["pieces"], kept["taken"]
    lines = [
        *_off(predict, pieces),
        "",
        f"Pieces of commit {taken['commit']}, {taken['date']}; between two ranks {LOOPBACK / 1e9:g} GB/s, assumed.",
        *([OLDER] if taken["date"] < min(row["taken"]["date"] for row in _rows().values()) else []),
        "",
        "| Model | Link per rank | 1 rank, h | 8 ranks, h | 64 ranks, h | Faster, at most: 8 | 64 | Stops paying at |",
        "|---" * 8 + "|",
    ]
    for model in predict.MODELS:
        for link, speed in LINKS.items():
            hours = {n: sum(predict.model_seconds(model, n, pieces, speed).values()) / 3600 for n in COUNTS}
            stop = next((n for n in COUNTS[:-1] if hours[n] < WORTH * hours[2 * n]), COUNTS[-1])
            figures = " | ".join(f"{hours[n]:.1f}" for n in (1, 8, 64))
            faster = " | ".join(f"{hours[1] / hours[n]:.1f} ×" for n in (8, 64))
            lines.append(f"| {model} | {link} | {figures} | {faster} | {stop} ranks |")
    lines += ["", f"Where the next doubling would gain less than {WORTH} ×, it has stopped paying.", ""]
    kinds = list(predict.model_seconds("8B", 1, pieces, 1.0))
    lines += [f"| Hours of 64 ranks, 10 Gb/s | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for model in predict.MODELS:
        seconds = predict.model_seconds(model, 64, pieces, LINKS["10 Gb/s"])
        lines.append(f"| {model} | " + " | ".join(f"{value / 3600:.2f}" for value in seconds.values()) + " |")
    return "\n".join(lines)


def _off(predict: ModuleType, pieces: dict[str, float]) -> Iterator[str]:
    """The same arithmetic for what has been measured."""
    rows = _rows()
    yield "| Work | Layers of 1 rank: predicted, measured s | Of 2 | Faster: predicted, at most | measured |"
    yield "|---" * 5 + "|"
    for work, layers in predict.MEASURED.items():
        own = [rows[f"{work} {count}"]["layers_s"] for count in (1, 2)]
        said = []
        for count in (1, 2):
            parts = predict.layer_seconds(layers, count, pieces, LOOPBACK, tokens=32 * 512)
            advance = parts["forward"] / parts.pop("runs")  # which the last layer does not do
            said.append(layers.count * sum(parts.values()) - advance)
        pairs = " | ".join(f"{mine:.1f}, {measured:.1f}" for mine, measured in zip(said, own, strict=True))
        yield f"| `{work}` | {pairs} | {said[0] / said[1]:.2f} × | {own[0] / own[1]:.2f} × |"
