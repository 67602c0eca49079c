"""A search for the number types of a KV cache alone: measure, choose, write the recipe."""

import time
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path

from quantkit.bit_search.cache_types import (
    MAX_TOKENS,
    CacheSearch,
    cache_remark,
    cache_section,
    check_cache_search,
    recipe_with_cache,
)
from quantkit.bit_search.options import SearchOptions, SearchTarget
from quantkit.bit_search.outputs import open_outputs
from quantkit.bit_search.recipe_file import write_recipe
from quantkit.bit_search.setup import set_up
from quantkit.errors import InputError
from quantkit.results import CacheSearchResult

_OF_WEIGHTS = ("candidates", "rounds", "checkpoint", "on", "jobs")  # options that apply only to weights


def search_cache(
    model: str | None, target: SearchTarget, options: SearchOptions, *, progress: Callable[[str], None] = lambda _: None
) -> CacheSearchResult:
    """Find the best number types of each layer's keys and values, and write the base recipe with this KV cache.

    Args:
        model: directory or hub id; None = the demo model. All measurements use the model's own weights.
        target: target of the search; only `kv_bits` is set.
        options: options of the search.
        progress: called with one line per event.
    Raises:
        InputError: the model, recipe, text or output cannot be used, or an option applies only to weights.
        GateFailure: no choice can meet the target.
    """
    started = time.perf_counter()
    assert target.kv_bits is not None and target.is_cache_only
    _check_options(options)
    check_cache_search(model, options)
    with open_outputs(model, target, options) as outputs:
        setup = set_up(model, replace(options, max_tokens=min(options.max_tokens, MAX_TOKENS)), progress)
        search = CacheSearch(setup, outputs.work.path, progress)
        chosen, base = search.find(target.kv_bits), options.recipe
        kept = base.name if "weights" in base.source else "The model's own weights"
        recipe = recipe_with_cache(
            base,
            cache_section(chosen),
            name=outputs.recipe_name,
            description=f"{kept}, with number types of each layer's keys and values from a search for {target.text}.",
            gates=list(base.gates),
            # `measured` is the KL of the whole recipe, which is unknown if weights are quantized too.
            measured=setup.measurement(chosen.measured_kl, search.held_out) if base.scheme.default is None else None,
        )
        remarks = [f"Written by `quantkit search` for {target.text}.", cache_remark(chosen, setup.data)]
        write_recipe(outputs.draft, recipe, remarks, {})
        outputs.hand_over(Path())
    return CacheSearchResult(
        model="demo" if model is None else str(model),
        recipe=str(outputs.recipe.output),
        base=base.name,
        target=target.text,
        kv_cache=chosen,
        data=setup.data,
        notes=setup.notes,
        seconds=time.perf_counter() - started,
    )


def _check_options(options: SearchOptions) -> None:
    """Refuse options that would have no effect."""
    for field in fields(options):
        if field.name in _OF_WEIGHTS and field.default is not MISSING and getattr(options, field.name) != field.default:
            flag = f"--{field.name}"
            raise InputError(
                f"{flag} applies to weights; add a target for weights, such as --bits, or leave {flag} out"
            )
