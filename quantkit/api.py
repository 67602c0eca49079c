"""The Python door: the same things as the command line, with recipes given by name, file or object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quantkit.compress.pipeline import quantize as _run
from quantkit.compress.pipeline.events import SILENT, Listener
from quantkit.compress.recipe import Recipe, load, shipped
from quantkit.compress.recipe.load import build
from quantkit.compress.recipe.override import Overrides, patched
from quantkit.results import CompressionResult, Report, SearchResult

if TYPE_CHECKING:
    from quantkit.evaluate.verify.run import VerifyOptions
    from quantkit.planning import Estimate

__all__ = ["list_recipes", "load_recipe", "plan", "quantize", "search", "verify"]


def quantize(
    model: str | Path | None = None,
    recipe: str | Path | Recipe = "awq-int4",
    output: str | Path | None = None,
    *,
    overrides: Overrides = (),
    device: str = "auto",
    activations: Literal["auto", "ram", "disk"] = "auto",
    resume: bool = True,
    overwrite: bool = False,
    engine: str | None = None,
    listener: Listener = SILENT,
) -> CompressionResult:
    """Compress a model to a new checkpoint.

    Args:
        model: a directory or a hub id; None = the demo model that comes with quantkit.
        recipe: a shipped name, a file, or a Recipe.
        output: directory to create; None = `./<model>-<recipe>`.
        overrides: recipe fields to replace, `{"weights.group_size": 32}` or `["weights.group_size=32"]`.
        device: "auto", "cpu", "cuda" or "cuda:1".
        activations: where hidden states are kept between layers; "auto": in memory where a GPU computes.
        resume: go on where an interrupted run with the same inputs stopped.
        overwrite: replace an existing output directory.
        engine: that is to read the result, "vllm", "vllm:h100" or another of `quantkit.engines`; what it cannot read is
            refused.
        listener: told about progress.
    Returns:
        what was done: sizes, errors per linear, times.
    Raises:
        QuantkitError: see `quantkit.errors`.
    """
    return _run(
        None if model is None else str(model),
        load_recipe(recipe, overrides),
        output,
        device=device,
        activations=activations,
        resume=resume,
        overwrite=overwrite,
        engine=engine,
        listener=listener,
    )


def load_recipe(recipe: str | Path | Recipe, overrides: Overrides = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        recipe: a shipped name, a file, or a Recipe (to change fields of).
        overrides: recipe fields to replace, by dotted path.
    Raises:
        RecipeError: one line that says file, field, value and what is valid.
    """
    if isinstance(recipe, Recipe):
        data = {"description": recipe.description, "gates": list(recipe.gates), **recipe.source}
        return build(patched(data, overrides), recipe.name) if overrides else recipe
    return load(recipe, overrides)


def list_recipes() -> dict[str, str]:
    """The shipped recipes: description by name."""
    return {name: load(name).description for name in shipped()}


def verify(
    checkpoint: str | Path,
    baseline: str | Path | None = None,
    *,
    gates: Sequence[str] | None = None,
    options: VerifyOptions | None = None,
    output: str | Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compare a checkpoint with its original and judge it by gates; `report.held` says whether all of them hold.

    Args:
        checkpoint: directory of the compressed model.
        baseline: directory or hub id of the original; None = what the checkpoint was made from.
        gates: e.g. `["recovery>=98.9", "kl<=0.02"]`; None = those of its recipe.
        options: what to look at, see `quantkit.evaluate.verify.run.VerifyOptions`; None = everything, briefly.
        output: directory for report.json, report.html, junit.xml and the model card; None = nothing is written.
        progress: told what is going on, in lines.
    Raises:
        QuantkitError: see `quantkit.errors`; a gate that does not hold raises nothing.
    """
    # Imported late: compressing and reading recipes need no runtime.
    from quantkit.evaluate.verify.pair import check_output, check_pair
    from quantkit.evaluate.verify.run import verify_pair
    from quantkit.report.files import write_report

    if output is not None:
        check_output(Path(output))
    report = verify_pair(check_pair(checkpoint, baseline, gates), options, progress=progress)
    if output is not None:
        write_report(report, Path(output))
    return report


def search(
    model: str | Path | None = None,
    recipe: str | Path | Recipe = "gptq-int4",
    output: str | Path | None = None,
    *,
    bits: float | None = None,
    num_bytes: int | None = None,
    kl: float | None = None,
    recovery: float | None = None,
    overrides: Overrides = (),
    progress: Callable[[str], None] = lambda _: None,
    **how: Any,
) -> SearchResult:
    """Find which numbers each part of a model should have, and write them as a recipe.

    Args:
        model: a directory or a hub id; None = the demo model that comes with quantkit.
        recipe: to start from: a shipped name, a file, or a Recipe.
        output: recipe file to write; None = `./<model>-<target>.yaml`.
        bits: stored bits per weight at most; give one of these four.
        num_bytes: of the whole checkpoint at most.
        kl: mean KL to the original at most.
        recovery: per cent of the original's task scores at least.
        overrides: recipe fields to replace, by dotted path.
        progress: told what is going on, in lines.
        how: further fields of `quantkit.bit_search.options.SearchOptions`: candidates, text, work, checkpoint ...
    Returns:
        what was chosen, expected and measured; `reached` says whether the target is met.
    Raises:
        QuantkitError: see `quantkit.errors`; a GateFailure where no choice can meet the target.
    """
    # Imported late: compressing and reading recipes need no runtime.
    from quantkit.bit_search.options import SearchOptions, SearchTarget
    from quantkit.bit_search.run import search_recipe

    target = SearchTarget(bits=bits, num_bytes=num_bytes, kl=kl, recovery=recovery)
    file = None if output is None else Path(output)
    options = SearchOptions(recipe=load_recipe(recipe, overrides), output=file, **how)
    return search_recipe(None if model is None else str(model), target, options, progress=progress)


def plan(model: str | Path | None = None, **wishes: Any) -> Estimate:
    """Estimate what compressing and running a model takes, before anything is spent; every figure is computed.

    Args:
        model: a directory, a config.json or a hub id; None = the demo model that comes with quantkit.
        wishes: keywords of `quantkit.planning.estimate`: recipe, device, context, batch, kv_cache and so on.
    Raises:
        InputError: the model, the recipe or a wish cannot be used.
    """
    from quantkit.planning import estimate

    return estimate(model, **wishes)
