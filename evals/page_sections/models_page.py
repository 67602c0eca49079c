"""Make docs/models.md and README's sentence about models from the rows of every_model.py."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checks"))

from every_model import RECIPES, ROOT, read, verdict
from provenance import table

RESULTS = ROOT / "evals/results/models"
TASKS = {"causal": "causal language models", "image-text": "image-text models, run on text"}
VERDICTS = {
    "right": "At least one recipe writes a correct checkpoint; the columns give the verdict of each recipe.",
    "quantkit only": "quantkit warns that transformers does not load the checkpoint, and runs it correctly itself.",
    "refused": "quantkit refuses every recipe in the default format; the message gives the reason.",
    "wrong": "A checkpoint does not load, or computes wrong values.",
    "crash": "quantkit stops with an error that it does not handle.",
    "not built": "transformers cannot build these classes from their shrunk default configuration and read them back.",
}
BUILT = [name for name in VERDICTS if name != "not built"]
HEAD = """\
# Models

{counts}

This page is generated from `{source}`. Each verdict comes from a run:

    python evals/checks/every_model.py           # measure the missing rows; with --again, all rows
    python evals/pages.py --write                # generate this page and README's sentence from the rows

The check builds every class that transformers lists for causal language modelling or for image-text-to-text. It takes
the default configuration of the class and shrinks the sizes in it (`evals/checks/tiny_models.py`). The weights are
random, and transformers writes the model. Some settings change the tensors of a class; they have separate rows, with
the setting after a colon. A class is *decoder-only* if it needs only token ids, is not configured as encoder and
decoder, and gives a position the same logits whatever tokens follow. Other classes are listed last. A type in both
lists counts as an image-text model. A recipe's verdict is *right* if the checkpoint passes all of these checks:

- If the recipe only rounds, its matrices differ from those of the source by no more than rounding.
- transformers loads it without missing, unexpected or mismatched tensors.
- In float32, its logits in transformers equal those of a copy of the source model in which the dequantized matrices
  replace the original ones. The check matches matrices by their values, not by their names. All other tensors must be
  equal, except those that SmoothQuant scales. If activations are quantized too, the median correlation of the logits
  over positions must be above {noisy}.
- At 8 bits, the correlation of its logits with those of the source model itself is above {kept}.
- quantkit computes the same tokens and log-probabilities as transformers, with or without transformers' cache.

A recipe's verdict is *quantkit only* if quantkit warned that transformers does not load the checkpoint, and the last
check passes. For every model, quantkit must also compute the same tokens as transformers from the source model. If 128
does not divide a width, groups are smaller; a line below the table names groups below 32. *Native*: quantkit's engine
computes the model; other models run through transformers. *Share*: the share of the matrices in decoder layers that
`rtn-int4` quantizes.
"""


def newest() -> Path:
    """Return the file with the rows of the highest version of transformers."""
    return max(RESULTS.glob("*.json"), key=lambda path: [int(part) for part in re.findall(r"\d+", path.stem)])


def sentence(file: Path) -> str:
    """Return what README says about the models that were tried."""
    rows = read(file).values()
    causal, image = count(rows, "causal"), count(rows, "image-text")
    return (
        f"We test every model class of transformers {file.stem} with a tiny model. A model passes if at least one\n"
        "recipe writes a checkpoint that transformers and quantkit load, with the expected logits and tokens in both.\n"
        f"Of {total(causal)} text models, {outcome(causal)}.\n"
        f"Of {total(image)} image-text models, {outcome(image)} ([models](docs/models.md))."
    )


def outcome(counts: Mapping[str, int]) -> str:
    """Return the verdicts of a task as a clause: "149 pass, 4 work only in quantkit and 3 are refused by quantkit"."""
    verbs = ("pass", "work only in quantkit", "are refused by quantkit", "give wrong results", "crash")
    clauses = [f"{counts[name]} {verb}" for name, verb in zip(BUILT, verbs, strict=True) if counts[name]]
    return " and ".join(filter(None, (", ".join(clauses[:-1]), clauses[-1])))


def total(counts: Mapping[str, int]) -> int:
    """Return the number of rows on which recipes were tried."""
    return sum(counts[name] for name in BUILT)


def said(counts: Mapping[str, int], verdicts: Iterable[str] = BUILT) -> str:
    """Return the counts of a task by verdict, without zeros."""
    return ", ".join(f"{counts[name]} {name}" for name in verdicts if counts[name]) or "all"


def count(rows: Iterable[Mapping[str, Any]], task: str) -> Counter[str]:
    """Count the rows of a task by verdict."""
    return Counter(verdict(row) for row in rows if row["task"] == task)


def render() -> str:
    """Return the page as text; it depends only on the newest rows."""
    from model_row import KEPT, NOISY

    file = newest()
    rows = read(file)
    source = file.relative_to(ROOT)
    parts = [HEAD.format(counts=_summary(rows, file.stem), source=source, noisy=NOISY, kept=KEPT)]
    for task, title in TASKS.items():
        chosen = {name: row for name, row in rows.items() if row["task"] == task}
        for kind, meaning in VERDICTS.items():
            group = {name: row for name, row in chosen.items() if verdict(row) == kind}
            if group:
                parts.append(f"## {kind.capitalize()}: {len(group)} {title}\n\n{meaning}\n\n{_table(group, kind)}\n")
    others = {name: row for name, row in rows.items() if verdict(row) == "no decoder"}
    parts.append(f"## Not decoder-only: {len(others)}\n\n{_reasons(others, 'decoder')}\n")
    return "\n".join(parts)


def _summary(rows: Mapping[str, Any], version: str) -> str:
    sentences = []
    for task, title in TASKS.items():
        counts = count(rows.values(), task)
        variants = sum(":" in name for name, row in rows.items() if row["task"] == task)
        also = f" ({variants} of them variants)" if variants else ""
        always = sum(_is_always_right(row) for row in rows.values() if row["task"] == task)
        sentences.append(
            f"transformers {version} has {total(counts)} decoder-only {title}{also}. Verdicts: {said(counts)}.\n"
            f"{always} of them are right with every recipe."
        )
    native = sum(row.get("source", {}).get("native", False) for row in rows.values())
    return "\n".join([*sentences, f"quantkit's engine computes {native} of all models on this page natively."])


def _is_always_right(row: Mapping[str, Any]) -> bool:
    return verdict(row) == "right" and all(entry["verdict"] == "right" for entry in row["recipes"].values())


def _table(group: Mapping[str, Any], kind: str) -> str:
    if kind == "not built":
        return _reasons(group, "built")
    recipes = [name for name in RECIPES if any(name in row["recipes"] for row in group.values())]
    head = ["Model", "Class", "Native", "Share", *(f"`{name}`" for name in recipes)]
    lines = []
    for name, row in group.items():
        entries = row["recipes"]
        share = next((f"{100 * entry['share']:.0f} %" for entry in entries.values() if "share" in entry), "")
        native = "yes" if row.get("source", {}).get("native") else ""
        shown = [entries.get(recipe, {}).get("verdict", "") for recipe in recipes]
        lines.append([f"`{name}`", row["class"], native, share, *shown])
    return "\n\n".join(filter(None, (table(head, lines), _reasons(group, ""))))


def _reasons(group: Mapping[str, Any], entry: str) -> str:
    """Return a list of reasons with the names of their models, most frequent first."""
    said: dict[str, list[str]] = {}
    for name, row in group.items():
        for reason in map(_plain, [row[entry]] if entry else _whys(row)):
            names = said.setdefault(reason, [])
            names.extend([] if f"`{name}`" in names else [f"`{name}`"])
    ordered = sorted(said.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return "\n".join(f"- {reason}: {', '.join(names)}" for reason, names in ordered)


def _whys(row: Mapping[str, Any]) -> list[str]:
    source = row.get("source", {})
    said = [row.get("crashed"), f"source model: {source['why']}" if "why" in source else None]
    sizes = [entry.get("set", {}).get("weights.group_size") for entry in row["recipes"].values()]
    said += [f"in groups of {size}, which divide every width" for size in sizes if size]
    return [why for why in (*said, *(entry.get("why") for entry in row["recipes"].values())) if why]


def _plain(reason: str) -> str:
    """Return a reason as Markdown, without what differs between models: names of tensors, shapes, numbers."""
    short = re.sub(r"\[.*\]", "[…]", reason)
    short = re.sub(r"\([\d, ]+\)", "(…)", re.sub(r"\b[\w]+(?:\.[\w]+)*\.\d+[\w.]*", "…", short))
    return re.sub(r"([|<>*_\[\]`])", r"\\\1", short)
