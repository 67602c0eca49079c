"""Compress Hugging Face causal language models, layer by layer, to checkpoints that common engines load.

Importing this package is cheap: it imports each public name on first use, and torch only if that name needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; `as` marks a name as exported
    from quantkit.api import list_recipes as list_recipes
    from quantkit.api import load_recipe as load_recipe
    from quantkit.api import plan as plan
    from quantkit.api import quantize as quantize
    from quantkit.api import search as search
    from quantkit.api import verify as verify
    from quantkit.compress.convert import convert as convert
    from quantkit.compress.distill.options import DistillOptions as DistillOptions
    from quantkit.compress.distill.run import distill as distill
    from quantkit.compress.recipe import Recipe as Recipe
    from quantkit.errors import QuantkitError as QuantkitError
    from quantkit.inspection import inspect as inspect
    from quantkit.results import CheckpointSummary as CheckpointSummary
    from quantkit.results import CompressionResult as CompressionResult
    from quantkit.results import Report as Report
    from quantkit.runtime.llm import LLM as LLM
    from quantkit.runtime.types import Completion as Completion
    from quantkit.runtime.types import SamplingParams as SamplingParams

    __version__: str

_HOMES = {
    "api": ("list_recipes", "load_recipe", "plan", "quantize", "search", "verify"),
    "compress.convert": ("convert",),
    "compress.distill.options": ("DistillOptions",),
    "compress.distill.run": ("distill",),
    "compress.recipe": ("Recipe",),
    "errors": ("QuantkitError",),
    "inspection": ("inspect",),
    "results": ("CheckpointSummary", "CompressionResult", "Report"),
    "runtime.llm": ("LLM",),
    "runtime.types": ("Completion", "SamplingParams"),
}
_HOME_OF = {name: f"quantkit.{home}" for home, names in _HOMES.items() for name in names}
__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from quantkit.distribution import own_version

        return own_version("0+unknown")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
