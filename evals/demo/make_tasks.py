"""Write the held-out test items of the lm-eval tasks, and the calibration text of the package.

python evals/demo/make_tasks.py
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

from language import TASKS, document_of_kind, draw_kind, held_out_items, split_marks

REPOSITORY = Path(__file__).resolve().parents[2]
TASKS_DIR = REPOSITORY / "evals" / "tasks" / "demo"
CALIBRATION = REPOSITORY / "quantkit" / "demo" / "calibration.txt"
NUM_ITEMS = 600
CALIBRATION_CHARACTERS = 300_000


def write_task(task: str, folder: Path) -> None:
    """The items of a task; the yaml beside them points lm-eval to it."""
    rows = []
    for item in held_out_items(task, NUM_ITEMS):
        fields = asdict(item)
        del fields["task"]
        rows.append(json.dumps(fields))
    (folder / f"demo_{task}.jsonl").write_text("\n".join(rows) + "\n")


def calibration_text(seed: str = "calibration", num_characters: int = CALIBRATION_CHARACTERS) -> str:
    """Documents as in training, from a seed of their own, with a blank line between any two."""
    rng = random.Random(seed)
    documents: list[str] = []
    length = 0
    while length < num_characters:
        raw = document_of_kind(draw_kind(rng), rng, long=rng.random() < 0.5)
        documents.append(split_marks(raw)[0])
        length += len(documents[-1]) + 2
    return "\n\n".join(documents) + "\n"


def main() -> None:
    """Write everything."""
    TASKS_DIR.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        write_task(task, TASKS_DIR)
    CALIBRATION.write_text(calibration_text())


if __name__ == "__main__":
    main()
