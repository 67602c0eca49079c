"""What the accuracy table consists of: models, number types, methods. Data; `run.py` measures it.

A method is the list of steps of a recipe, so each row is a recipe that a user can write down: `recipe()` gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Steps = list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """A number type of weights, and of activations where they are quantized.

    Args:
        bits, group: of weights; group None = per channel.
        activations: type of the inputs, or None.
    """

    bits: int
    group: int | None = None
    activations: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model of the test bed.

    Args:
        name: folder below --models; the demo model is in the package.
        numbers: names of what it is quantized to.
        tasks: asked of the rows that --tasks names.
        windows: of the text, at most.
        text: scored, below --data; None = drawn from the demo language.
        calibration: text that calibration windows are drawn from, below --data; None = the bundled one.
    """

    name: str
    numbers: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    text: str | None = None
    calibration: str | None = None
    windows: int = 1000


NUMBERS = {
    "w4g32": Numbers(bits=4, group=32),
    "w3g32": Numbers(bits=3, group=32),
    "w2g32": Numbers(bits=2, group=32),
    "w4g4": Numbers(bits=4, group=4),
    "w4pc": Numbers(bits=4),
    "w8pc": Numbers(bits=8),
    "w8a8": Numbers(bits=8, activations="int8"),
}

METHODS: dict[str, Steps] = {
    "rtn": [],
    "rtn calibrated": ["rtn"],
    "awq": ["awq"],
    "gptq": ["gptq"],
    "gptq asymmetric": [{"gptq": {"asymmetric_calibration": 1.0}}],
    "gptq asymmetric sequential": [{"gptq": {"asymmetric_calibration": 1.0, "true_sequential": True}}],
    "awq+gptq": ["awq", "gptq"],
    "awq+gptq asymmetric": ["awq", {"gptq": {"asymmetric_calibration": 1.0}}],
    "autoround": ["autoround"],
    "awq+autoround": ["awq", "autoround"],
}

STORIES = {"text": "tinystories/validation.txt", "calibration": "tinystories/calibration.txt"}
DEMO_TASKS = ("demo_agreement", "demo_answers", "demo_arithmetic", "demo_facts", "demo_recall", "demo_stories")
MODELS = (
    Model(name="demo", numbers=("w4g32", "w3g32", "w2g32", "w4pc", "w8pc", "w8a8"), tasks=DEMO_TASKS, windows=400),
    Model(
        name="babyllama-361",
        numbers=("w4g32", "w3g32", "w2g32", "w4pc", "w8pc", "w8a8"),
        tasks=("local_blimp",),
        **STORIES,
    ),
    Model(name="stories260k", numbers=("w4g4", "w4pc", "w8pc", "w8a8"), **STORIES),
)

SAMPLES, LENGTH = 128, 256  # calibration windows, the same ids for every tool


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A row to measure."""

    numbers: str
    method: str
    symmetric: bool

    @property
    def key(self) -> str:
        """Names the row in a file of results."""
        return f"{self.numbers} {self.method} {'sym' if self.symmetric else 'asym'}"


def wanted(model: Model) -> Iterator[Wanted]:
    """All rows of a model: both forms of ranges where weights alone are quantized to fewer than 8 bits."""
    for numbers in model.numbers:
        forms = (True, False) if NUMBERS[numbers].bits < 8 else (True,)
        for method in METHODS:
            if NUMBERS[numbers].bits < 8 or method in ("rtn", "gptq"):
                yield from (Wanted(numbers=numbers, method=method, symmetric=form) for form in forms)


def recipe(row: Wanted, calibration: str) -> dict[str, Any]:
    """The recipe of a row as plain data.

    Args:
        row: see `wanted`.
        calibration: a .jsonl file of token ids.
    """
    numbers, steps = NUMBERS[row.numbers], METHODS[row.method]
    weights = {
        "dtype": f"int{numbers.bits}",
        "group_size": numbers.group or "channel",
        "symmetric": row.symmetric,
    }
    made: dict[str, Any] = {"name": "accuracy", "weights": weights}
    if numbers.activations:
        made["activations"] = {"dtype": numbers.activations}
    if steps:
        made["steps"] = steps
        made["calibration"] = {"data": calibration, "samples": SAMPLES, "sequence_length": LENGTH}
    return made
