"""The answers of a verification where vLLM computes: one model after another, since two do not fit at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.evaluate.fidelity import Windows
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.run import evaluate
from quantkit.evaluate.top_fidelity import TopReading, read_top
from quantkit.results import EvaluationResult
from quantkit.runtime.vllm_engine import VllmLLM

OF_THE_COMPRESSION = ("kv_cache_dtype", "speculative_config", "quantization")
"""Options of vLLM that are for the checkpoint only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What one model said.

    Args:
        reading: of the windows.
        evaluation: its answers; None when nothing was asked.
        notes: how it ran.
        arithmetic: what it computed in.
    """

    reading: TopReading
    evaluation: EvaluationResult | None
    notes: tuple[str, ...]
    arithmetic: str


def ask_served(
    path: Path,
    vllm: Mapping[str, Any],
    settings: Mapping[str, Any],
    asked: EvaluationOptions | None,
    windows: Callable[[VllmLLM], Windows],
    progress: Callable[[str], None],
) -> Served:
    """Load a model into vLLM, ask it everything, and let go of it.

    Args:
        path: its directory.
        vllm: vLLM's own settings.
        settings: of `EngineConfig`.
        asked: tasks and texts; None = none.
        windows: that distributions are read on, cut by the model that is asked first.
        progress: told what is done, in a line.
    Raises:
        QuantkitError: as `VllmLLM` and `evaluate`.
    """
    with VllmLLM(path, options=vllm, **settings) as llm:
        return Served(
            reading=read_top(llm, windows(llm)),
            evaluation=None if asked is None else evaluate(llm, asked, progress=progress),
            notes=llm.notes,
            arithmetic=llm.arithmetic,
        )


def of_the_original(vllm: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's settings without those that belong to the compression."""
    return {name: value for name, value in vllm.items() if name not in OF_THE_COMPRESSION}
