"""Write the held-out test items as lm-eval tasks, and the calibration text of the package.

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

ABOUT = {
    "stories": "the family name of one of four to six people, told once at the beginning of the story; the families\n"
    "# of the others are the wrong answers.",
    "facts": "facts about 160 towns that the model must have stored; each is asked in the one wording of five in\n"
    "# which it never occurs in training.",
    "arithmetic": "sums and differences of two-digit numbers, of operand pairs that never occur in training.",
    "agreement": "singular or plural verb, with one or two distracting nouns between subject and verb.",
    "recall": "the value of a key from a ledger of 36 to 52 pairs, over 200 to 300 tokens with other text between.",
}

YAML = """\
# Demo language, {task}: {about}
# Written by evals/demo/make_tasks.py, described in evals/demo/README.md. Run from the repository root, offline:
#   lm_eval --model hf --model_args pretrained=quantkit/demo/model,dtype=float32 \\
#     --include_path evals/tasks/demo --tasks demo_{task}
task: demo_{task}
tag: demo
dataset_path: json
dataset_kwargs:
  data_files:
    test: evals/tasks/demo/demo_{task}.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
# The choices bring their own leading space.
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def write_task(task: str, folder: Path) -> None:
    """One jsonl of items and the yaml that points lm-eval to it."""
    rows = []
    for item in held_out_items(task, NUM_ITEMS):
        fields = asdict(item)
        del fields["task"]
        rows.append(json.dumps(fields))
    (folder / f"demo_{task}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / f"demo_{task}.yaml").write_text(YAML.format(task=task, about=ABOUT[task]))


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
