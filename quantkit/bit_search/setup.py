"""What every search starts with: the original model, and the text in two halves."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.bit_search.options import SearchOptions
from quantkit.bit_search.outputs import SearchState
from quantkit.checkpoints.folder import resolve
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline.identity import calibration_digest, describe_versions
from quantkit.compress.recipe import Recipe
from quantkit.demo import GENERAL_TEXT
from quantkit.errors import DataError, InputError
from quantkit.evaluate.fidelity import Windows, fixed_windows
from quantkit.evaluate.loading import UNQUANTIZED, load_llm
from quantkit.evaluate.sensitivity import few
from quantkit.evaluate.tasks import read_named_text, speaks_demo
from quantkit.quantities import dtype_name
from quantkit.runtime.llm import LLM

REFERENCE_BYTES = 2 << 30  # limit for the size of the original's reference logits
_SHORT = 64  # tokens; windows as short would say little, and nothing about a cache with pages of 64 tokens
_CHOSEN = ("name", "weights", "overrides", "embedding", "kv_cache")  # fields of a recipe that a search sets


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The original model and the text.

    Args:
        original: the loaded original.
        engine: keyword arguments of `LLM` for further models; `open_state` sets the number of threads.
        source: digests of the model's files.
        data, text_sha256: name and digest of the text.
        windows: windows on which the search measures.
        held_out: as many other windows for the result; the same ones if the text has no others.
        notes: remarks for the user.
    """

    original: LLM
    engine: dict[str, Any]
    source: dict[str, str]
    data: str
    text_sha256: str
    windows: Windows
    held_out: Windows
    notes: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens on which the search measures."""
        return sum(map(len, self.windows))

    def measurement(self, kl: float, windows: Windows) -> dict[str, Any]:
        """Return the section `measured` of a recipe, for a KL on these windows."""
        tokens = sum(map(len, windows))
        return {"kl": round(kl, 6), "text": Path(self.data).name, "text_sha256": self.text_sha256, "tokens": tokens}

    def open_state(
        self, path: Path, about: dict[str, Any], progress: Callable[[str], None], windows: Windows | None = None
    ) -> SearchState:
        """Open the file of measured numbers, and compute with its number of threads from now on.

        Args:
            path: path of the file.
            about: what determines the numbers, besides the model, the text, the versions and the device.
            progress: called with one line if there are numbers.
            windows: text of the measurements; None = `self.windows`.
        Raises:
            ResumeError: the file holds the numbers of another search.
        """
        model = self.original.model
        identity = {
            **about,
            "source": self.source,
            "windows": hashlib.sha256(repr(self.windows if windows is None else windows).encode()).hexdigest(),
            "versions": describe_versions(),
            "arithmetic": dtype_name(model.dtype),
            "device": model.device.type,
        }
        state = SearchState(path, identity)
        # Sums depend on the number of threads: a resumed search keeps the thread count of its first measurement.
        self.engine["threads"] = state.threads
        torch.set_num_threads(state.threads)
        if state.resumed:
            progress(f"reusing {state.resumed} measurements of an earlier search in {path.parent}")
        return state


def set_up(model: str | None, options: SearchOptions, progress: Callable[[str], None]) -> Setup:
    """Load the original and read the text.

    Args:
        model: directory or hub id; None = the demo model.
        options: options of the search.
        progress: called with one line per event.
    Raises:
        InputError: the model or the text cannot be used.
    """
    folder = resolve(model)
    engine: dict[str, Any] = {"dtype": "float32", "device": options.device, **options.engine}
    progress("loading the original")
    original = load_llm(str(folder), **engine)
    if original.kv_type not in UNQUANTIZED:  # the source's own settings, which recipes replace
        plain = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype_name(original.model.dtype)]
        del original
        original = load_llm(str(folder), **engine, kv_cache=plain)
    data, text_sha256, windows, notes = _windows(original, options)
    # Neighbouring windows have similar content, so both halves are alike and share no token.
    used = few(windows[::2], original.model.vocab_size, options.max_tokens, REFERENCE_BYTES)
    held_out = windows[1::2][: len(used)]
    if max(map(len, held_out), default=0) <= _SHORT:
        held_out = used
        notes = (*notes, "The text is too short to hold tokens out: the result is measured on those of the choice.")
    return Setup(
        original=original,
        engine=engine,
        source=CheckpointReader(folder).digests,
        data=data,
        text_sha256=text_sha256,
        windows=used,
        held_out=held_out,
        notes=notes,
    )


def describe_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe contributes to measured numbers.

    The fields that candidates set are left out, so that a search with other candidates can reuse the numbers.
    """
    source = {key: value for key, value in recipe.source.items() if key not in _CHOSEN}
    return {"recipe": source, "calibration": calibration_digest(recipe)}


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
