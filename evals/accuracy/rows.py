"""What the accuracy table consists of: models, number types, methods, peers. Data; `run.py` and `peers.py` measure it.

A method is the list of steps of a recipe, so each row is a recipe that a user can write down: `recipe()` gives it.
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
    """A number type of weights, and of activations where they are quantized.

    Args:
        bits, group: of weights; group None = per channel, or what the type brings along.
        dtype: of weights, where it is no integer of that many bits.
        activations: type of the inputs, or None.
        preset: what llm-compressor calls it, where it is no integer.
    """

    bits: int
    group: int | None = None
    dtype: str = ""
    activations: str | None = None
    preset: str = ""

    @property
    def is_integer(self) -> bool:
        """Whether there are zero points to choose."""
        return not self.dtype


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
        without: why a tool has no rows, by its name.
        folder: below --models, if it is not called as the model is.
        samples, length: calibration windows, the same ids for every tool.
        methods: names of ours, if not all that its number types are measured with.
        peers: names of methods of other tools, likewise.
        keeps_predictions: the original's are held in memory: windows x vocabulary.
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
CALIBRATED = "rtn calibrated"
METHODS_OF_FEW_BITS = ("rtn", "awq", "gptq", SHIPPED, f"awq+{SHIPPED}", "autoround")
METHODS_OF_EIGHT = ("rtn", CALIBRATED, "gptq", SHIPPED)
METHODS_OF_FLOATS = (*METHODS_OF_EIGHT, "autoround")
# What `true_sequential` brings, at 4 bits alone.
ABLATED = {
    ("demo", "w4g32"): ("gptq asymmetric", "awq+gptq asymmetric"),
    **{(f"smollm2-135m-instruct-{size}", "w4g64"): ("gptq asymmetric",) for size in ("16x256", "64x512")},
    ("gemma3-270m-16x256", "w4g64"): ("gptq asymmetric",),
}

# Why a row is behind the best peer, by model, number type and form; the page says where none is known.
REASONS: dict[tuple[str, str, bool], str] = {}

STORIES = {"text": "tinystories/validation.txt", "calibration": "tinystories/calibration.txt"}
FLOATS = ("fp8", "nvfp4", "mxfp4")
# Of real models the shipped recipes' methods, AWQ alone, and what needs no tuning of other tools; every number
# type with one number of calibration tokens, 4 bits in groups with fewer and with more too.
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
        without={AUTO_ROUND: "it does not quantize matrices whose sizes 32 does not divide, here 15 of 35"},
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
            ("gemma3-270m", False),  # a vocabulary of 262 thousand
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
        """Names the row in a file of results."""
        return f"{self.numbers} {self.method} {'sym' if self.symmetric else 'asym'}"


def wanted(model: Model) -> Iterator[Wanted]:
    """All rows of a model: both forms of ranges where integers of fewer than 8 bits are all that is quantized."""
    for name in model.numbers:
        numbers = NUMBERS[name]
        for method in (*(model.methods or methods_of(numbers)), *ABLATED.get((model.name, name), ())):
            for form in forms(numbers):
                calibration = {"samples": model.samples, "length": model.length}
                yield Wanted(numbers=name, method=method, symmetric=form, **calibration)


def methods_of(numbers: Numbers) -> tuple[str, ...]:
    """Names of the methods that a number type is measured with."""
    if not numbers.is_integer:
        return METHODS_OF_EIGHT if numbers.activations else METHODS_OF_FLOATS
    return METHODS_OF_EIGHT if numbers.bits >= 8 else METHODS_OF_FEW_BITS


def forms(numbers: Numbers) -> tuple[bool, ...]:
    """Without zero points, and with them where 8 bits do not make them needless."""
    return (True, False) if numbers.is_integer and numbers.bits < 8 else (True,)


def recipe(row: Wanted, calibration: str) -> dict[str, Any]:
    """The recipe of a row as plain data.

    Args:
        row: see `wanted`.
        calibration: a .jsonl file of token ids.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A method of another tool.

    Args:
        tool: as the page calls it.
        method: likewise.
        job: method and options of the script in evals/peers.
        bits: of integers that it is measured at; empty = none.
        presets: the types that are no integers, as far as it is measured on them.
        zero_points: whether with them; None = both forms.
        groups: whether it has groups of any size; else of 16 and more.
    """

    tool: str
    method: str
    job: dict[str, Any]
    bits: tuple[int, ...] = (2, 3, 4, 8)
    presets: tuple[str, ...] = ()
    zero_points: bool | None = None
    groups: bool = True

    def key(self, numbers: str, symmetric: bool, version: str) -> str:
        """Names the row in a file of results."""
        return f"{numbers} {self.tool} {version} {self.method} {'sym' if symmetric else 'asym'}"


_MSE: dict[str, Any] = {"options": {"observer": "memoryless_mse"}}
_WIDER: dict[str, Any] = {"options": {"observer": "fouroversix"}}  # ranges beyond the largest weight too
_NVFP4_ONLY: dict[str, Any] = {"bits": (), "presets": ("nvfp4",)}
PEERS = (  # plain rounding, and GPTQ without a search of ranges, are left to these where they can be had
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
    """Method, number type and form of every row that a peer can do."""
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


def peer_job(peer: Peer, name: str, symmetric: bool) -> dict[str, Any]:
    """What evals/peers/job.py reads, but for the folders."""
    numbers = NUMBERS[name]
    options = dict(peer.job.get("options", {}))
    if numbers.preset:
        options["scheme"] = numbers.preset
    elif numbers.activations and peer.tool == LLM_COMPRESSOR:
        options["inputs"] = numbers.activations
    if peer.tool == GPTQ_MODEL and peer.job["method"] == "gptq" and numbers.group is None:
        options["act_group_aware"] = False  # it refuses the two together
    return {
        "method": peer.job["method"],
        "bits": numbers.bits,
        "group": numbers.group or -1,
        "symmetric": symmetric,
        "dtype": "float32",
        "options": options,
    }
