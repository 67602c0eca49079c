"""A model of the test bed, loaded for measurements: windows of its text, predictions of the original, and tasks.

All random choices have fixed seeds, so quantkit and its peers get the same windows, calibration ids and items.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rows import Model
from score import Windows, first_ids, load, log_probabilities, read_windows, score
from store import Answers, Row, pack
from torch import Tensor

from quantkit.demo import DEMO_MODEL, DEMO_TEXT, GENERAL_TEXT, is_demo
from quantkit.evaluate.run import evaluate
from quantkit.runtime.llm import LLM

TEXT_CHARACTERS = 450_000  # of text in the demo language, for more than 400 windows


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What the rows of one model are measured against.

    Args:
        model: declaration of the model.
        path: path of the original.
        data: folder with texts and task items; None = no folder.
        original: the original in float32.
        windows: windows of the text.
        reference: predictions of the original on the windows; None if they are too large to keep.
    """

    model: Model
    path: Path
    data: Path | None
    original: LLM
    windows: Windows
    reference: list[Tensor] | None


def open_bench(model: Model, models: Path | None, data: Path | None) -> Bench:
    """Load the original and read its text.

    Args:
        model: declaration of the model.
        models, data: folders of models and of data; the demo model does not need them.
    """
    path = DEMO_MODEL if model.text is None else _below(models, model.folder or model.name, "--models")
    original = load(path)
    windows = read_windows(original, _text(model.text, data, "accuracy", TEXT_CHARACTERS), max_windows=model.windows)
    return Bench(
        model=model,
        path=path,
        data=data,
        original=original,
        windows=windows,
        reference=list(log_probabilities(original, windows)) if model.keeps_predictions else None,
    )


def _below(folder: Path | None, name: str, option: str) -> Path:
    if folder is None or not (folder / name).exists():
        raise SystemExit(f"{name} is not in the folder of {option} ({folder}); give the folder that contains it")
    return folder / name


def _text(name: str | None, data: Path | None, seed: str, characters: int) -> str:
    if name is not None:
        return _below(data, name, "--data").read_text(encoding="utf-8")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))
    from make_tasks import calibration_text

    return str(calibration_text(seed, characters))


def write_calibration(bench: Bench, path: Path) -> None:
    """Write windows of token ids from random places of the calibration text, with seed 0.

    Each window is one line, and starts with BOS if the model has it.

    Args:
        bench: bench of the model that will read the windows.
        path: a .jsonl file that a recipe can use as calibration.data.
    """
    bundled = DEMO_TEXT if is_demo(bench.path) else GENERAL_TEXT
    name, count, length = bench.model.calibration, bench.model.samples, bench.model.length
    text = bundled.read_text(encoding="utf-8") if name is None else _text(name, bench.data, "", 0)
    tokenizer: Any = bench.original.tokenizer
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    draw, first = random.Random(0), first_ids(bench.original)
    starts = [draw.randrange(0, len(ids) - length + 1) for _ in range(count)]
    samples = [[*first, *ids[start : start + length - len(first)]] for start in starts]
    path.write_text("".join(json.dumps({"input_ids": sample}) + "\n" for sample in samples), encoding="utf-8")


def measure(bench: Bench, checkpoint: Path, *, tasks: bool, **about: Any) -> Row:
    """Score a checkpoint on the text, and run the model's tasks with it.

    Args:
        bench: what the checkpoint is measured against.
        checkpoint: a checkpoint in any layout that quantkit reads.
        tasks: whether to run the tasks.
        about: the other fields of `Row`.
    """
    llm = load(checkpoint)
    (found,) = score([llm], bench.original, bench.windows, bench.reference)
    return Row(
        windows=found.windows,
        tokens=found.tokens,
        nll=found.nll,
        kl=found.kl,
        top1=found.top1,
        tasks=ask(bench, llm) if tasks else {},
        **about,
    )


def ask(bench: Bench, llm: LLM) -> dict[str, Answers]:
    """Return the answers to all items of the model's tasks."""
    if not bench.model.tasks:
        return {}
    run = partial(evaluate, llm, tasks=_names(bench))
    found = run() if bench.data is None else run(data=[bench.data / "benchmarks"])
    return {task.task: pack([score > 0.5 for score in task.scores]) for task in found.tasks}


def _names(bench: Bench) -> list[str]:
    """Return the tasks of the model; each paradigm of BLiMP is a task, so that paradigms have equal weights."""
    names = list(bench.model.tasks)
    if "local_blimp" in names and bench.data is not None:
        names.remove("local_blimp")
        names += [f"local_blimp_{path.stem}" for path in sorted((bench.data / "benchmarks" / "blimp").glob("*.jsonl"))]
    return names
