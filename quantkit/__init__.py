"""Compress Hugging Face causal language models layer by layer to checkpoints the ecosystem loads.

Importing this is cheap: each name below is fetched on first use, and torch only with those that need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.api import list_recipes, load_recipe, plan, quantize, search, verify
    from quantkit.compress.convert import convert
    from quantkit.compress.recipe import Recipe
    from quantkit.errors import QuantkitError
    from quantkit.inspection import inspect
    from quantkit.results import CheckpointSummary, CompressionResult, Report
    from quantkit.runtime.llm import LLM
    from quantkit.runtime.types import Completion, SamplingParams

    __version__: str

__all__ = [
    "LLM",
    "CheckpointSummary",
    "Completion",
    "CompressionResult",
    "QuantkitError",
    "Recipe",
    "Report",
    "SamplingParams",
    "__version__",
    "convert",
    "inspect",
    "list_recipes",
    "load_recipe",
    "plan",
    "quantize",
    "search",
    "verify",
]

_HOMES = {
    "LLM": "quantkit.runtime.llm",
    "CheckpointSummary": "quantkit.results",
    "Completion": "quantkit.runtime.types",
    "CompressionResult": "quantkit.results",
    "QuantkitError": "quantkit.errors",
    "Recipe": "quantkit.compress.recipe",
    "Report": "quantkit.results",
    "SamplingParams": "quantkit.runtime.types",
    "convert": "quantkit.compress.convert",
    "inspect": "quantkit.inspection",
    "list_recipes": "quantkit.api",
    "load_recipe": "quantkit.api",
    "plan": "quantkit.api",
    "quantize": "quantkit.api",
    "search": "quantkit.api",
    "verify": "quantkit.api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("quantkit")
    except PackageNotFoundError:  # imported from a source checkout
        return "0+unknown"
