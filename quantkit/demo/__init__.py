"""Files that come with the package: the demo model, calibration texts, recipes, suites and tasks.

evals/demo describes how the demo model and its text were made.
"""

import importlib.resources
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCES = {"recipes": "recipes", "suites": "evals/suites", "tasks": "evals/tasks"}

DEMO_MODEL = _FOLDER / "model"
DEMO_TEXT = _FOLDER / "calibration.txt"
GENERAL_TEXT = _FOLDER / "text" / "general.txt"


def is_demo(model: Path) -> bool:
    """Whether a folder contains the demo model, or a model made from it."""
    tokenizer = model / "tokenizer.json"
    # Compression changes names and weights, but not the tokenizer: its bytes identify the language.
    return tokenizer.is_file() and tokenizer.read_bytes() == (DEMO_MODEL / "tokenizer.json").read_bytes()


def bundled_calibration(model: Path) -> Path:
    """Return the file that calibration text `bundled` stands for, given the folder of the model."""
    return DEMO_TEXT if is_demo(model) else GENERAL_TEXT


def bundled_folder(kind: str) -> Path:
    """Return the folder of the shipped `recipes`, `suites` or `tasks`."""
    try:
        return Path(str(importlib.resources.files(f"quantkit.{kind}")))
    except ModuleNotFoundError:  # a source checkout: the folder lies beside the package
        return _FOLDER.parents[1] / _SOURCES[kind]
