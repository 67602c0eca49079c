"""What every search starts with: the original model, the text in two halves, and the numbers measured before."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.bit_search.options import SearchOptions
from quantkit.bit_search.outputs import Outputs, SearchState
from quantkit.checkpoints.folder import resolve
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline.identity import calibration_digest, describe_versions
from quantkit.compress.recipe import Recipe
from quantkit.demo import GENERAL_TEXT
from quantkit.errors import DataError, InputError
from quantkit.evaluate.fidelity import Windows, fixed_windows
from quantkit.evaluate.loading import load_llm
from quantkit.evaluate.sensitivity import few
from quantkit.evaluate.tasks import read_named_text, speaks_demo
from quantkit.quantities import dtype_name
from quantkit.runtime.llm import LLM

_REFERENCE_BYTES = 2 << 30  # limit for the size of the original's reference logits
_CHOSEN = ("name", "weights", "overrides", "embedding", "kv_cache")  # fields of a recipe that a search sets


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The original model, the text, and the numbers measured before.

    Args:
        original: the loaded original.
        engine: keyword arguments of `LLM` with which it was loaded.
        source: digests of the model's files.
        data, text_sha256: name and digest of the text.
        windows: windows on which the search measures.
        held_out: as many other windows for the result; the same ones if the text has no others.
        notes: remarks for the user.
        state: the numbers.
    """

    original: LLM
    engine: dict[str, Any]
    source: dict[str, str]
    data: str
    text_sha256: str
    windows: Windows
    held_out: Windows
    notes: tuple[str, ...]
    state: SearchState

    @property
    def num_tokens(self) -> int:
        """Tokens on which the search measures."""
        return sum(map(len, self.windows))

    def measurement(self, kl: float) -> dict[str, Any]:
        """Return the section `measured` of a recipe, for a KL on the held-out windows."""
        tokens = sum(map(len, self.held_out))
        return {"kl": round(kl, 6), "text": Path(self.data).name, "text_sha256": self.text_sha256, "tokens": tokens}


def set_up(model: str | None, options: SearchOptions, outputs: Outputs, progress: Callable[[str], None]) -> Setup:
    """Load the original and read the text.

    Args:
        model: directory or hub id; None = the demo model.
        options: options of the search.
        outputs: locked output paths.
        progress: called with one line per event.
    Raises:
        InputError: the model or the text cannot be used, or the numbers measured before are those of another search.
    """
    folder = resolve(model)
    engine: dict[str, Any] = {"dtype": "float32", "device": options.device, **options.engine}
    progress("loading the original")
    original = load_llm(str(folder), **engine)
    data, text_sha256, windows, notes = _windows(original, options)
    # Neighbouring windows have similar content, so both halves are alike and share no token.
    used = few(windows[::2], original.model.vocab_size, options.max_tokens, _REFERENCE_BYTES)
    identity = _identity(options.recipe, folder, original, used)
    state = SearchState(outputs.work.path / "state.json", identity)
    # Sums depend on the number of threads: a resumed search keeps the thread count of its first measurement.
    engine["threads"] = state.threads
    torch.set_num_threads(state.threads)
    if state.resumed:
        progress(f"reusing {state.resumed} measurements of an earlier search in {outputs.work.path}")
    return Setup(
        original=original,
        engine=engine,
        source=identity["source"],
        data=data,
        text_sha256=text_sha256,
        windows=used,
        held_out=windows[1::2][: len(used)] or used,  # a text with a single window leaves none to hold out
        notes=notes,
        state=state,
    )


def _windows(original: LLM, options: SearchOptions) -> tuple[str, str, Windows, tuple[str, ...]]:
    """Return the name of the text, its SHA-256, its windows, and a note if calibration may have used the same text."""
    notes: tuple[str, ...] = ()
    if options.text is not None:
        name, content = options.text, read_named_text(options.text, ())
    elif speaks_demo(original):
        name, content = "demo", read_named_text("demo", ())
    else:
        name, content = "general.txt (calibration text)", GENERAL_TEXT.read_text(encoding="utf-8")
        notes = ("Sensitivities are measured on quantkit's own calibration text; give your own text with --text.",)
    if options.max_tokens < 1:
        raise InputError(f"max_tokens is {options.max_tokens}; give at least 1")
    windows = fixed_windows(original, content, max_tokens=2 * options.max_tokens)
    if not windows:
        raise DataError(f"text {name!r} is too short for one window; give a longer text")
    return name, hashlib.sha256(content.encode()).hexdigest(), windows, notes


def _identity(recipe: Recipe, folder: Path, original: LLM, windows: Windows) -> dict[str, Any]:
    """Return everything that determines the measured numbers, as plain data."""
    # Leave out the fields that candidates set, so that a search with other candidates can reuse the numbers.
    source = {key: value for key, value in recipe.source.items() if key not in _CHOSEN}
    return {
        "recipe": source,
        "calibration": calibration_digest(recipe),
        "source": CheckpointReader(folder).digests,
        "windows": hashlib.sha256(repr(windows).encode()).hexdigest(),
        "versions": describe_versions(),
        "arithmetic": dtype_name(original.model.dtype),
        "device": original.model.device.type,
    }
