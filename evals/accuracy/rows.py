"""The rows of the accuracy table as data: models, number types, methods, peers. `run.py` and `peers.py` measure them.

A method is the list of steps of a recipe, so each row is a recipe that a user can write; `recipe()` returns it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_tools import AUTO_ROUND, GPTQ_MODEL, LLM_COMPRESSOR

Steps = list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """A number type of weights, and of activations if they are quantized.

    Args:
        bits, group: bits and group size of the weights; group None = per channel.
        dtype: type of the weights; empty = integers of `bits` bits.
        activations: type of the activations; None = unquantized.
        preset: name of the type in llm-compressor; empty for integers.
    """

    bits: int
    group: int | None = None
    dtype: str = ""
    activations: str | None = None
    preset: str = ""

    @property
    def is_integer(self) -> bool:
        """Whether the weights are integers, which can have zero points."""
        return not self.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model of the test bed.

    Args:
        name: name of the model, and of its folder in --models; the demo model is in the package.
        numbers: names of the number types to which the model is quantized.
        tasks: tasks that are run on the rows selected by --tasks.
        windows: maximum number of windows of the text.
        text: path in --data of the text to score; None = a text drawn from the demo language.
        calibration: path in --data of the text for calibration; None = the bundled text.
        without: reasons why a tool has no rows, keyed by tool.
        folder: name of the folder in --models if it differs from `name`.
        samples, length: number of calibration windows, and tokens in each; every tool gets the same ids.
        methods: names of our methods; None = all methods for the number types.
        peers: names of the methods of other tools; None = all.
        keeps_predictions: whether the original's predictions are kept in memory, for all windows and tokens.
    """

    name: str
    numbers: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    text: str | None = None
    calibration: str | None = None
    windows: int = 1000
    without: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    samples: int = 128
    length: int = 256
    methods: tuple[str, ...] | None = None
    peers: tuple[str, ...] | None = None
    keeps_predictions: bool = True


NUMBERS = {
    "w4g32": Numbers(bits=4, group=32),
    "w4g64": Numbers(bits=4, group=64),
    "w3g32": Numbers(bits=3, group=32),
    "w3g64": Numbers(bits=3, group=64),
    "w2g32": Numbers(bits=2, group=32),
    "w2g64": Numbers(bits=2, group=64),
    "w4g4": Numbers(bits=4, group=4),
    "w4pc": Numbers(bits=4),
    "w8pc": Numbers(bits=8),
    "w8a8": Numbers(bits=8, activations="int8"),
    "fp8": Numbers(bits=8, dtype="fp8", activations="fp8", preset="FP8_DYNAMIC"),
    "nvfp4": Numbers(bits=4, group=16, dtype="nvfp4", preset="NVFP4A16"),
    "mxfp4": Numbers(bits=4, group=32, dtype="mxfp4", preset="MXFP4A16"),
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
    "awq+gptq asymmetric sequential": ["awq", {"gptq": {"asymmetric_calibration": 1.0, "true_sequential": True}}],
    "autoround": ["autoround"],
}
SHIPPED = "gptq asymmetric sequential"
DISTILLED = f"{SHIPPED}, distilled"
METHODS[DISTILLED] = METHODS[SHIPPED]
CALIBRATED = "rtn calibrated"
METHODS_OF_FEW_BITS = ("rtn", "awq", "gptq", SHIPPED, f"awq+{SHIPPED}", "autoround")
METHODS_OF_EIGHT = ("rtn", CALIBRATED, "gptq", SHIPPED)
METHODS_OF_FLOATS = (*METHODS_OF_EIGHT, "autoround")
# Rows that show the gain of `true_sequential`, only at 4 bits.
ABLATED = {
    ("demo", "w4g32"): ("gptq asymmetric", "awq+gptq asymmetric"),
    **{(f"smollm2-135m-instruct-{size}", "w4g64"): ("gptq asymmetric",) for size in ("16x256", "64x512")},
    ("gemma3-270m-16x256", "w4g64"): ("gptq asymmetric",),
}

# Number types, and whether they are symmetric, that are measured with and without `quantkit distill`, by model.
TRAINED = {"smollm2-135m-instruct-128x512": (("w2g64", False), ("w3g64", True))}

# Reasons why a row is behind the best peer, keyed by model, number type and form; the page says if none is known.
REASONS: dict[tuple[str, str, bool], str] = {}

STORIES = {"text": "tinystories/validation.txt", "calibration": "tinystories/calibration.txt"}
FLOATS = ("fp8", "nvfp4", "mxfp4")
# Real models get the methods of the shipped recipes, AWQ alone, and the methods of other tools that need no tuning.
# All number types are measured with 16 windows of 256 tokens, and 4 bits in groups with more calibration tokens too.
REAL: dict[str, Any] = {
    "text": "wikitext2/test.raw.txt",
    "methods": ("rtn", "awq", "awq+gptq", SHIPPED, "autoround"),
    "peers": (
        "rounding, memoryless_mse",
        "GPTQ, memoryless_mse",
        "AWQ, then GPTQ",
        "GPTQ",
        "AutoRound, 200 iterations",
    ),
}
REAL_CALIBRATION = {
    (16, 256): ("w4g64", "w4pc", "w3g64", "w2g64", "w8pc", "w8a8", *FLOATS),
    (64, 512): ("w4g64",),
    (128, 512): ("w4g64",),
}
DEMO_TASKS = ("demo_agreement", "demo_answers", "demo_arithmetic", "demo_facts", "demo_recall", "demo_stories")
MODELS = (
    Model(
        name="demo",
        numbers=("w4g32", "w3g32", "w2g32", "w4pc", "w8pc", "w8a8", *FLOATS),
        tasks=DEMO_TASKS,
        windows=400,
    ),
    Model(
        name="babyllama-361",
        numbers=("w4g32", "w3g32", "w2g32", "w4pc", "w8pc", "w8a8", *FLOATS),
        tasks=("local_blimp",),
        **STORIES,
    ),
    Model(
        name="stories260k",
        numbers=("w4g4", "w4pc", "w8pc", "w8a8"),
        without={AUTO_ROUND: "it does not quantize matrices with a size that 32 does not divide, here 15 of 35"},
        **STORIES,
    ),
    *(
        Model(
            name=f"{folder}-{samples}x{length}",
            folder=folder,
            samples=samples,
            length=length,
            keeps_predictions=keeps,
            windows=80 if keeps else 40,
            numbers=numbers,
            **REAL,
        )
        for folder, keeps in (
            ("smollm2-135m-instruct", True),
            ("gemma3-270m", False),  # has a vocabulary of 262 thousand
            ("qwen2.5-coder-0.5b-instruct", False),
        )
        for (samples, length), numbers in REAL_CALIBRATION.items()
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A row to measure."""

    numbers: str
    method: str
    symmetric: bool
    samples: int = 128
    length: int = 256

    @property
    def key(self) -> str:
        """Name of the row in a file of results."""
        return f"{self.numbers} {self.method} {'sym' if self.symmetric else 'asym'}"


def wanted(model: Model) -> Iterator[Wanted]:
    """Yield all rows of a model; integers of fewer than 8 bits are measured with and without zero points."""
    for name in model.numbers:
        numbers = NUMBERS[name]
        for method in (*(model.methods or methods_of(numbers)), *ABLATED.get((model.name, name), ())):
            for form in forms(numbers):
                calibration = {"samples": model.samples, "length": model.length}
                yield Wanted(numbers=name, method=method, symmetric=form, **calibration)


def trained(model: Model) -> Iterator[Wanted]:
    """Yield the rows of docs/distill.md: of each number type, the row without distillation and the row with it."""
    for numbers, form in TRAINED.get(model.name, ()):
        for method in (SHIPPED, DISTILLED):
            yield Wanted(numbers=numbers, method=method, symmetric=form, samples=model.samples, length=model.length)


def methods_of(numbers: Numbers) -> tuple[str, ...]:
    """Return the names of the methods with which a number type is measured."""
    if not numbers.is_integer:
        return METHODS_OF_EIGHT if numbers.activations else METHODS_OF_FLOATS
    return METHODS_OF_EIGHT if numbers.bits >= 8 else METHODS_OF_FEW_BITS


def forms(numbers: Numbers) -> tuple[bool, ...]:
    """Return the values of `symmetric` to measure; only integers of fewer than 8 bits are measured with zero points."""
    return (True, False) if numbers.is_integer and numbers.bits < 8 else (True,)


def recipe(row: Wanted, calibration: str) -> dict[str, Any]:
    """Return the recipe of a row as plain data.

    Args:
        row: a row from `wanted`.
        calibration: path of a .jsonl file of token ids.
    """
    numbers, steps = NUMBERS[row.numbers], METHODS[row.method]
    weights: dict[str, Any] = {"dtype": numbers.dtype or f"int{numbers.bits}"}
    if numbers.is_integer:
        weights |= {"group_size": numbers.group or "channel", "symmetric": row.symmetric}
    made: dict[str, Any] = {"name": "accuracy", "weights": weights}
    if numbers.activations:
        made["activations"] = {"dtype": numbers.activations}
    if steps:
        made["steps"] = steps
        made["calibration"] = {"data": calibration, "samples": row.samples, "sequence_length": row.length}
    return made


def whole(row: Wanted, calibration: str) -> dict[str, Any]:
    """Return the recipe of a row; if `quantkit distill` follows, its options are under the key `distill`."""
    return {**recipe(row, calibration), **({"distill": {"steps": 96}} if row.method == DISTILLED else {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A method of another tool.

    Args:
        tool, method: names on the page.
        job: method and options for the script in evals/peers.
        bits: integer bits with which the method is measured; empty = no integers.
        presets: names of the other number types with which the method is measured.
        zero_points: whether the method is measured with zero points; None = with and without.
        groups: whether groups may have any size; False = groups have at least 16 weights.
    """

    tool: str
    method: str
    job: dict[str, Any]
    bits: tuple[int, ...] = (2, 3, 4, 8)
    presets: tuple[str, ...] = ()
    zero_points: bool | None = None
    groups: bool = True

    def key(self, numbers: str, symmetric: bool, version: str) -> str:
        """Return the name of a row in a file of results."""
        return f"{numbers} {self.tool} {version} {self.method} {'sym' if symmetric else 'asym'}"


_MSE: dict[str, Any] = {"options": {"observer": "memoryless_mse"}}
_WIDER: dict[str, Any] = {"options": {"observer": "fouroversix"}}  # also tries ranges beyond the largest weight
_NVFP4_ONLY: dict[str, Any] = {"bits": (), "presets": ("nvfp4",)}
PEERS = (  # methods that search for ranges stand here instead of the same methods without this search
    Peer(tool=LLM_COMPRESSOR, method="rounding, memoryless_mse", job={"method": "rtn", **_MSE}, presets=FLOATS),
    Peer(tool=LLM_COMPRESSOR, method="GPTQ, memoryless_mse", job={"method": "gptq", **_MSE}, presets=FLOATS),
    Peer(tool=LLM_COMPRESSOR, method="rounding, fouroversix", job={"method": "rtn", **_WIDER}, **_NVFP4_ONLY),
    Peer(tool=LLM_COMPRESSOR, method="GPTQ, fouroversix", job={"method": "gptq", **_WIDER}, **_NVFP4_ONLY),
    Peer(tool=LLM_COMPRESSOR, method="AWQ, then GPTQ", job={"method": "awq+gptq"}, bits=(2, 3, 4), zero_points=True),
    Peer(tool=GPTQ_MODEL, method="GPTQ", job={"method": "gptq"}, groups=False),
    Peer(tool=GPTQ_MODEL, method="GPTQ, mse=2.0", job={"method": "gptq", "options": {"mse": 2.0}}, groups=False),
    Peer(tool=AUTO_ROUND, method="AutoRound, 200 iterations", job={"method": "signround", "options": {"iters": 200}}),
)


def peer_rows(model: Model) -> Iterator[tuple[Peer, str, bool]]:
    """Yield method, number type and `symmetric` of every row that other tools can make."""
    for peer in PEERS:
        if peer.tool in model.without or (model.peers is not None and peer.method not in model.peers):
            continue
        for name in model.numbers:
            numbers = NUMBERS[name]
            can = numbers.bits in peer.bits and (peer.groups or (numbers.group or 16) >= 16)
            if numbers.activations and peer.tool != LLM_COMPRESSOR:
                continue
            if not (can if numbers.is_integer else name in peer.presets):
                continue
            given = [form for form in forms(numbers) if peer.zero_points is None or form != peer.zero_points]
            yield from ((peer, name, form) for form in given)


def peers_of_trained(model: Model) -> Iterator[tuple[Peer, str, bool]]:
    """Yield the rows of other tools on docs/distill.md: AutoRound, which trains too, though one layer after another."""
    for numbers, form in TRAINED.get(model.name, ()):
        yield from ((peer, numbers, form) for peer in PEERS if peer.tool == AUTO_ROUND)


def peer_job(peer: Peer, name: str, symmetric: bool) -> dict[str, Any]:
    """Return the job that evals/peers/job.py reads, without the folders."""
    numbers = NUMBERS[name]
    options = dict(peer.job.get("options", {}))
    if numbers.preset:
        options["scheme"] = numbers.preset
    elif numbers.activations and peer.tool == LLM_COMPRESSOR:
        options["inputs"] = numbers.activations
    if peer.tool == GPTQ_MODEL and peer.job["method"] == "gptq" and numbers.group is None:
        options["act_group_aware"] = False  # GPTQModel refuses it without groups
    return {
        "method": peer.job["method"],
        "bits": numbers.bits,
        "group": numbers.group or -1,
        "symmetric": symmetric,
        "dtype": "float32",
        "options": options,
    }
