"""What every search starts with: the recipe, the original model, and the text in two halves."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.bit_search.options import SearchOptions
from quantkit.bit_search.outputs import SearchState
from quantkit.checkpoints.folder import resolve
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline.state import calibration_digest, describe_versions
from quantkit.compress.recipe import Recipe, load
from quantkit.compress.recipe.load import build
from quantkit.compress.recipe.override import Overrides, patched
from quantkit.errors import InputError
from quantkit.evaluate.fidelity import Windows, fixed_windows
from quantkit.evaluate.loading import UNQUANTIZED, load_llm
from quantkit.evaluate.sensitivity import few
from quantkit.evaluate.tasks import GENERAL, read_named_text, speaks_demo
from quantkit.formats import REGISTRY as FORMATS
from quantkit.quantities import dtype_name
from quantkit.runtime.llm import LLM

REFERENCE_BYTES = 2 << 30  # limit for the size of the original's reference logits
_SHORT = 64  # tokens; windows this short would say little, and nothing about a cache with pages of 64 tokens
_CHOSEN = ("name", "weights", "overrides", "embedding", "kv_cache")  # fields of a recipe that a search sets
_DEFAULT = "gptq-int4"
# The search chooses the overrides itself, and the recipe's gates are for another size: both are cleared.
_DEFAULT_GGUF, _CLEARED = "gguf-q4_k", ("overrides", "gates")


def start_recipe(
    name: str | Path | None, format_name: str | None = None, changes: Overrides = (), *, cache_only: bool = False
) -> Recipe:
    """Read the recipe that a search starts from.

    Args:
        name: name of a shipped recipe, or path of a .yaml file; None = the default for the format.
        format_name: on-disk format; None = the recipe's.
        changes: fields to replace, see `load`.
        cache_only: whether the default is a recipe that leaves the weights unquantized.
    Raises:
        InputError: there is no such format.
        RecipeError: see `load`.
    """
    fields: dict[str, object] = {}
    if format_name is not None:
        fields["format"] = FORMATS.find(format_name)
    if name is None and cache_only:
        data = {"name": "kv-cache", "kv_cache": {"dtype": "int4", "outliers": "off"}, **fields}
        return build(patched(data, changes), "the default recipe of a search for a KV cache")
    if name is None:
        is_gguf = fields.get("format") == "gguf"
        name = _DEFAULT_GGUF if is_gguf else _DEFAULT
        fields |= {field: [] for field in _CLEARED} if is_gguf else {}
    if isinstance(changes, Mapping):
        return load(name, {**fields, **changes})
    given = [changes] if isinstance(changes, str) else changes
    return load(name, [*(f"{path}={json.dumps(value)}" for path, value in fields.items()), *given])


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The original model and the text.

    Args:
        original: the loaded original.
        engine: keyword arguments of `LLM` for further models; `open_state` sets the number of threads.
        source: digests of the model's files.
        data, text_sha256: name and digest of the text.
        windows: windows on which the search measures.
        held_out: other windows, on which the result is measured; equal to `windows` if the text is too short.
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
            progress: called with one line if the file holds numbers.
            windows: text of the measurements; None = `self.windows`.
        Raises:
            ResumeError: the file holds numbers of a search with a different identity.
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
    """Load the original model, and read the text on which KL is measured.

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
    if original.kv_type not in UNQUANTIZED:  # the checkpoint's own cache settings, which recipes replace
        plain = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype_name(original.model.dtype)]
        del original
        original = load_llm(str(folder), **engine, kv_cache=plain)
    data, text_sha256, windows, notes = _windows(original, options)
    # Alternate windows: the two halves share no token, but have similar content, as neighbouring windows do.
    used = few(windows[::2], original.model.vocab_size, options.max_tokens, REFERENCE_BYTES)
    held_out = windows[1::2][: len(used)]
    if max(map(len, held_out), default=0) <= _SHORT:
        held_out = used
        notes = (*notes, "The text is too short to hold tokens out: the result is measured on those used to choose.")
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
    """Return the parts of a recipe that affect the measured numbers.

    The fields that candidates set are left out, so that a search with other candidates can reuse the numbers.
    """
    source = {key: value for key, value in recipe.source.items() if key not in _CHOSEN}
    return {"recipe": source, "calibration": calibration_digest(recipe)}


def _windows(original: LLM, options: SearchOptions) -> tuple[str, str, Windows, tuple[str, ...]]:
    """Return the name of the text, its SHA-256, its windows, and a note if calibration may have used the same text."""
    default = "demo" if speaks_demo(original) else GENERAL
    name = default if options.text is None else options.text
    content = read_named_text(name, ())
    note = "Sensitivities are measured on quantkit's own calibration text; give your own text with --text."
    if options.max_tokens < 1:
        raise InputError(f"max_tokens is {options.max_tokens}; give at least 1")
    windows = fixed_windows(original, content, max_tokens=2 * options.max_tokens)
    return name, hashlib.sha256(content.encode()).hexdigest(), windows, (note,) if name == GENERAL else ()
