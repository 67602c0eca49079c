"""`quantkit search`: find the number type for each part of a model, and write a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quantkit.bit_search.options import SearchOptions, SearchTarget
from quantkit.cli._options import RUN, option_group, set_option, settings_of
from quantkit.cli._output import Command, Output
from quantkit.quantities import byte_size, elapsed
from quantkit.report.table import Table, facts
from quantkit.runtime.config import EngineConfig

if TYPE_CHECKING:
    from quantkit.results import CacheChoice, CacheSearchResult, SearchResult


_START = (
    "Recipe to start from.  [default: gptq-int4; with --format gguf, gguf-q4_k; with --kv-bits alone, a recipe that "
    "leaves the weights unchanged]"
)


@click.command("search", cls=Command, short_help="Find the best number of bits for each part of a model.")
@click.argument("model", required=False)
@option_group("target", settings_of(SearchTarget))
@click.option("--recipe", metavar="NAME|FILE", help=_START)
@click.option("--format", "format_", metavar="NAME", help="On-disk format.  [default: the recipe's]")
@set_option
@option_group("how", {**settings_of(SearchOptions), **RUN})
@option_group("engine", settings_of(EngineConfig, "dtype", "threads"), shown={"dtype": "fp32"})
def command(
    output_to: Output,
    *,
    model: str | None,
    recipe: str | None,
    format_: str | None,
    changes: tuple[str, ...],
    target: dict[str, Any],
    how: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Measure the loss of each part of MODEL at each number of bits, choose the bits that meet a target, and write a
    recipe.

    Without MODEL, the bundled demo model is used. The recipe can be passed unchanged to `quantkit quantize`. The
    expected and the measured KL are printed and written into the recipe.

    \b
    Examples:
      quantkit search --bits 4.5
      quantkit search --bits 3.5 --set calibration.samples=32 -o coarse.yaml
      quantkit search --kl 0.02 --work trials -o small.yaml
      quantkit search --recovery 99 --candidates int3,int4,int8 --work trials
      quantkit search --format gguf --size 1500KiB --set calibration.samples=8
      quantkit search --kv-bits 4 -o cache.yaml
      quantkit search --bits 4.5 --kv-bits 4
    """
    if not target or len(target.keys() - {"kv_bits"}) > 1:
        raise click.UsageError(
            "give exactly one of --bits, --size, --kl and --recovery; --kv-bits can be added to it or given alone"
        )
    from quantkit.bit_search import cache_run, run
    from quantkit.bit_search.setup import start_recipe

    asked = SearchTarget(**target)
    start = start_recipe(recipe, format_, changes, cache_only=asked.is_cache_only)
    options = SearchOptions(recipe=start, engine=engine, **how)
    if asked.is_cache_only:
        chosen = cache_run.search_cache(model, asked, options, progress=output_to.tell)
        summary, choices = _cache_summary(chosen), _cache_choices(chosen.kv_cache)
        output_to.result(chosen.to_dict(), summary, choices, _written(chosen))
        return
    result = run.search_recipe(model, asked, options, progress=output_to.tell)
    written = _written(result, verify=options.recipe.format != "gguf")  # `quantize --verify` supports no GGUF files
    cache = None if result.kv_cache is None else _cache_choices(result.kv_cache)
    output_to.result(result.to_dict(), _summary(result), _choices(result), cache, written)
    output_to.require(result.reached, _missed(result))


def _summary(result: SearchResult) -> Table:
    chosen = f"{result.search_kl:.5f} on the tokens used for the choice, {result.sum_kl:.5f} as the sum over groups"
    return facts(
        [
            ("model", result.model),
            ("target", f"{result.target}, {'reached' if result.reached else 'missed'}"),
            ("bits per weight", f"{result.bits_per_weight:.3f}, scales included"),
            ("size", byte_size(result.output_bytes)),
            ("expected KL", f"{result.expected_kl:.5f} on {result.data} ({chosen})"),
            ("measured KL", f"{result.measured_kl:.5f} (expected {100 * result.prediction_error:+.0f} %)"),
            ("KV cache", None if result.kv_cache is None else _cache_kl(result.kv_cache)),
            ("recovery", None if result.recovery is None else f"{result.recovery:.2f} %"),
            ("time", elapsed(result.seconds)),
            *(("note", text) for text in result.notes),
        ]
    )


def _cache_summary(result: CacheSearchResult) -> Table:
    cache = result.kv_cache
    uniform = (f"{name}: {kl:.5f}" for name, kl in cache.uniform.items())
    return facts(
        [
            ("model", result.model),
            ("target", result.target),
            ("KV cache", _cache_kl(cache)),
            ("measured on", f"{result.data}; on the tokens used for the choice {cache.search_kl:.5f}"),
            ("same types in all layers", ", ".join(uniform) or None),
            ("time", elapsed(result.seconds)),
            *(("note", text) for text in result.notes),
        ]
    )


def _cache_kl(cache: CacheChoice) -> str:
    return f"{cache.bits:.3f} bits per key or value, scales included; KL while decoding {cache.measured_kl:.5f}"


def _cache_choices(cache: CacheChoice) -> Table:
    from quantkit.report.tables import layer_table

    sides = {(of.layer, side): getattr(of, side) for of in cache.layers for side in ("keys", "values")}
    return layer_table("KV cache, by layer", sides)


def _choices(result: SearchResult) -> Table:
    from quantkit.report.tables import layer_table

    return layer_table("chosen, by layer", {(group.layer, group.group): group.choice for group in result.groups})


def _missed(result: SearchResult) -> str:
    reached = f"KL {result.measured_kl:.5f}" if result.recovery is None else f"recovery {result.recovery:.2f} %"
    return (
        f"{result.target} was not reached: {result.recipe} gives {reached} at {result.bits_per_weight:.3f} bits per "
        "weight; relax the target, or give candidates with more bits"
    )


def _written(result: SearchResult | CacheSearchResult, *, verify: bool = True) -> str:
    model = "" if result.model == "demo" else f"{result.model} "
    step = f"quantkit quantize {model}--recipe {result.recipe}{' --verify' if verify else ''}"
    return f"written to {result.recipe}; next: {step}"
