"""Python API: functions that do what the commands do. A recipe can be given as a name, a file or a `Recipe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quantkit.compress.pipeline import quantize as _run
from quantkit.compress.pipeline.state import SILENT, Listener
from quantkit.compress.recipe import Recipe, load, shipped
from quantkit.compress.recipe.load import build
from quantkit.compress.recipe.override import Overrides, patched
from quantkit.results import CacheSearchResult, CompressionResult, Report, SearchResult

if TYPE_CHECKING:
    from quantkit.evaluate.verify.options import VerifyOptions
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
    adapter: str | Path | None = None,
    listener: Listener = SILENT,
) -> CompressionResult:
    """Compress a model, and write a new checkpoint.

    Args:
        model: a directory or a hub id; None = the demo model that comes with quantkit.
        recipe: a shipped name, a file, or a Recipe.
        output: directory to create, or file if the recipe's format is a single file; None = `./<model>-<recipe>`.
        overrides: recipe fields to replace, `{"weights.group_size": 32}` or `["weights.group_size=32"]`.
        device: "auto", "cpu", "cuda" or "cuda:1".
        activations: where to keep hidden states between layers; "auto" keeps them in memory if a GPU computes, and on
            disk otherwise.
        resume: continue an interrupted run that had the same inputs; False = start over.
        overwrite: replace an existing output.
        engine: engine that must be able to read the result, e.g. "vllm" or "vllm:h100"; see `quantkit.engine_rules`.
            If the engine cannot read the recipe's result, quantkit refuses before the work starts. None = any engine.
        adapter: folder of a LoRA adapter in PEFT's format, which is merged into the model before quantizing; None = no
            adapter.
        listener: object that receives progress events, see `quantkit.compress.pipeline.state.Listener`.
    Returns:
        Record of the compression: sizes, error of each linear, times.
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
        adapter=adapter,
        listener=listener,
    )


def load_recipe(recipe: str | Path | Recipe, overrides: Overrides = ()) -> Recipe:
    """Read a recipe, replace some of its fields, and check the result.

    Args:
        recipe: a shipped name, a file, or a Recipe.
        overrides: recipe fields to replace, see `quantize`.
    Raises:
        RecipeError: the recipe is not valid; the message gives file, field, value and the valid values.
    """
    if isinstance(recipe, Recipe):
        measured = None if recipe.measured is None else dict(recipe.measured)
        data = {"description": recipe.description, "gates": list(recipe.gates), "measured": measured, **recipe.source}
        return build(patched(data, overrides), recipe.name) if overrides else recipe
    return load(recipe, overrides)


def list_recipes() -> dict[str, str]:
    """Return the descriptions of the shipped recipes, keyed by recipe name."""
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
    """Compare a checkpoint with its original and evaluate gates; `report.held` says whether all gates held.

    Args:
        checkpoint: directory of the compressed model.
        baseline: directory or hub id of the original; None = the model that the checkpoint was made from.
        gates: gates, e.g. `["recovery>=98.9", "kl<=0.02"]`; None = the gates of the checkpoint's recipe.
        options: what to measure, see `quantkit.evaluate.verify.options.VerifyOptions`; None = the defaults, which are
            short measurements.
        output: directory for report.json, report.html, junit.xml and the model card; None = write no files.
        progress: function that receives progress messages.
    Raises:
        QuantkitError: see `quantkit.errors`; a failed gate raises no error.
    """
    # Imported late, because compressing and reading recipes need no engine.
    from quantkit.evaluate.verify.pair_checks import check_output, check_pair
    from quantkit.evaluate.verify.run import verify_pair
    from quantkit.report.files import write_report

    if output is not None:
        check_output(Path(output))

    def write(report: Report) -> None:
        if output is not None:
            write_report(report, Path(output))

    adapters = options.engine.get("adapters", ()) if options is not None else ()
    pair = check_pair(checkpoint, baseline, gates, adapters=adapters)
    report = verify_pair(pair, options, progress=progress, keep=write)
    write(report)
    return report


def search(
    model: str | Path | None = None,
    recipe: str | Path | Recipe | None = None,
    output: str | Path | None = None,
    *,
    format: str | None = None,
    bits: float | None = None,
    num_bytes: int | None = None,
    kl: float | None = None,
    recovery: float | None = None,
    kv_bits: float | None = None,
    overrides: Overrides = (),
    progress: Callable[[str], None] = lambda _: None,
    **how: Any,
) -> SearchResult | CacheSearchResult:
    """Choose the number type of each part of a model that meets a target, and write the choice as a recipe.

    Give exactly one of `bits`, `num_bytes`, `kl` and `recovery`; `kv_bits` can be added to it or given alone.

    Args:
        model: a directory or a hub id; None = the demo model that comes with quantkit.
        recipe: recipe to start from: a shipped name, a file, or a Recipe. None = gptq-int4; for the format gguf,
            gguf-q4_k without its overrides and gates; with `kv_bits` alone, a recipe that leaves the weights unchanged.
        output: recipe file to write; None = `./<model>-<target>.yaml`.
        format: on-disk format, such as gguf; None = the recipe's format.
        bits: target: maximum stored bits per weight.
        num_bytes: target: maximum bytes of the whole checkpoint or file.
        kl: target: maximum mean KL to the original.
        recovery: target: minimum recovery, which is the task scores in per cent of the original's.
        kv_bits: target for the KV cache: maximum stored bits per key or value.
        overrides: recipe fields to replace, see `quantize`.
        progress: function that receives progress messages.
        how: further fields of `quantkit.bit_search.options.SearchOptions`: candidates, text, work, checkpoint ...
    Returns:
        The choice with its expected and measured KL; `reached` says whether the target was met. A CacheSearchResult if
        only `kv_bits` is given.
    Raises:
        QuantkitError: see `quantkit.errors`; a GateFailure if no choice can meet the target.
    """
    # Imported late, because compressing and reading recipes need no engine.
    from quantkit.bit_search.cache_run import search_cache
    from quantkit.bit_search.options import SearchOptions, SearchTarget
    from quantkit.bit_search.run import search_recipe
    from quantkit.bit_search.setup import start_recipe

    target = SearchTarget(bits=bits, num_bytes=num_bytes, kl=kl, recovery=recovery, kv_bits=kv_bits)
    file = None if output is None else Path(output)
    if isinstance(recipe, Recipe):
        start = load_recipe(recipe, overrides)
        start = start if format is None else load_recipe(start, {"format": format})
    else:
        start = start_recipe(recipe, format, overrides, cache_only=target.is_cache_only)
    options = SearchOptions(recipe=start, output=file, **how)
    run = search_cache if target.is_cache_only else search_recipe
    return run(None if model is None else str(model), target, options, progress=progress)


def plan(model: str | Path | None = None, **wishes: Any) -> Estimate:
    """Estimate the memory, disk space and best possible speed of a model, and what compressing it needs.

    Nothing is measured.

    Args:
        model: a directory, a config.json or a hub id; None = the demo model that comes with quantkit.
        wishes: keywords of `quantkit.planning.estimate`: recipe, device, context, batch, kv_cache and so on.
    Raises:
        InputError: the model, the recipe or another argument is not valid.
    """
    from quantkit.planning import estimate

    return estimate(model, **wishes)
