"""Options of a search, without torch, so that `--help` is fast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.quantities import parse_bytes
from quantkit.settings import setting

if TYPE_CHECKING:
    from quantkit.compress.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """Options of a search. The text of a field's `setting` describes it; this list adds what the texts leave out.

    Args:
        recipe: base recipe; the search keeps its steps, calibration, format and ignored modules.
        on, jobs: with "local" and 1, this process compresses every trial itself.
        work: None = a folder beside the output, deleted when the search is done.
        device: "auto", "cpu", "cuda" or "cuda:<i>".
        engine: keyword arguments of `LLM`; the default dtype is float32.
        resume: continue a search that was interrupted.
        overwrite: replace an existing recipe file or checkpoint.
    """

    recipe: Recipe
    output: Path | None = setting(
        None, "Recipe to write.", flag="-o --output FILE", kind=Path, shown="./<model>-<target>.yaml"
    )
    candidates: tuple[str, ...] = setting(
        (),
        "Number types to choose from, e.g. int4,int4:32,int8:channel.",
        flag="--candidates A,B",
        commas=True,
        shown="all integers",
    )
    text: str | None = setting(None, "Text on which KL is measured.", flag="--text FILE", shown="a shipped one")
    max_tokens: int = setting(8192, "Number of tokens of that text per measurement.", flag="--tokens", minimum=2)
    rounds: int = setting(
        3,
        "Rounds that correct the choice for interactions between groups; applies to --bits and --size.",
        flag="--rounds",
        minimum=0,
    )
    work: Path | None = setting(
        None, "Folder for trials and measurements, kept for further searches.", flag="--work DIR", kind=Path
    )
    checkpoint: Path | None = setting(
        None,
        "Folder, or GGUF file, for the compressed model that is measured at the end.",
        flag="--checkpoint DIR",
        kind=Path,
    )
    on: str = setting("local", "Where trials run: local, ray or ray:ADDRESS.", flag="--on PLACE")
    jobs: int = setting(1, "Number of local trials at a time.", flag="--jobs", minimum=1)
    device: str = "auto"
    engine: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = True
    overwrite: bool = False


_OF_WEIGHTS = {"bits": "bits<={:g}", "num_bytes": "bytes<={}", "kl": "kl<={:g}", "recovery": "recovery>={:g}"}
_CONDITIONS = {**_OF_WEIGHTS, "kv_bits": "kv_bits<={:g}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchTarget:
    """Target of a search: one of the first four values for the weights, `kv_bits` for the KV cache, or both.

    Raises:
        InputError: no target or several targets for the weights are given, or a value is not positive and finite.
    """

    bits: float | None = setting(
        None, "Target: at most this many stored bits per weight.", flag="--bits", above=0, kind=float
    )
    num_bytes: int | None = setting(
        None,
        "Target: at most this size of the whole checkpoint or GGUF file, e.g. 2GiB or 90MB.",
        flag="--size SIZE",
        read=partial(parse_bytes, what="size"),
    )
    kl: float | None = setting(None, "Target: at most this mean KL to the original.", flag="--kl", above=0, kind=float)
    recovery: float | None = setting(
        None,
        "Target: at least this percentage of the original's task scores.",
        flag="--recovery",
        minimum=0,
        maximum=100,
        kind=float,
    )

    kv_bits: float | None = setting(
        None,
        "Target for the KV cache, alone or with a target for weights: at most this many stored bits per key or value.",
        flag="--kv-bits",
        above=0,
        kind=float,
    )

    def __post_init__(self) -> None:
        given = [value for name in _CONDITIONS if (value := getattr(self, name)) is not None]
        several = [name for name in _OF_WEIGHTS if getattr(self, name) is not None][1:]
        if several or not given or not all(0 < value < math.inf for value in given):  # nan is neither
            raise InputError(
                "a search needs a target above zero: one of --bits, --size, --kl and --recovery for the weights, "
                "--kv-bits for the KV cache, or both"
            )

    @property
    def is_cache_only(self) -> bool:
        """Whether only the KV cache is searched."""
        return all(getattr(self, name) is None for name in _OF_WEIGHTS)

    @property
    def text(self) -> str:
        """The target as conditions, e.g. `bits<=4.5, kv_bits<=4`."""
        values = ((condition, getattr(self, name)) for name, condition in _CONDITIONS.items())
        return ", ".join(condition.format(value) for condition, value in values if value is not None)

    @property
    def of_weights(self) -> str:
        """The target for the weights as a condition; if there is none, the target for the cache."""
        return self.text.partition(", ")[0]
