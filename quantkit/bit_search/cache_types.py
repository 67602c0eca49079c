"""Find the number types of each layer's keys and values, within a number of bits, by the KL while decoding.

Sensitivities are measured with the smallest type of a side, whose KL stands out from rounding of the computation: one
layer and one side at a time, with the other side in 8 bits. With a larger type, the sensitivity is smaller by the same
factor as the KL of a cache with this type in all layers. `solve` then chooses as if sensitivities were additive. The
best caches with the same types in all layers are measured too, so that the result is never worse than these.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from quantkit.bit_search.setup import Setup
from quantkit.bit_search.solve import Choice, Option, least_sensitivity, total
from quantkit.checkpoints.folder import resolve
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline.kv_cache import check_cache
from quantkit.compress.recipe import Recipe
from quantkit.compress.recipe.load import build
from quantkit.compress.recipe.override import patched
from quantkit.errors import GateFailure, ModelError, SchemeError
from quantkit.evaluate.fidelity import Distances, Windows, batches, distances, join_distances, window_logits
from quantkit.evaluate.sensitivity import few
from quantkit.kernels.layouts import KVLayout
from quantkit.models.kv_sizes import DEFAULT_PAGE_SIZE, side_of
from quantkit.numerics.kv_cache import (
    INT2_TOKEN,
    INT3_CHANNEL,
    INT3_TOKEN,
    INT4_CHANNEL,
    INT4_TOKEN,
    INT8_CHANNEL,
    INT8_TOKEN,
    UNQUANTIZED,
    LayerCache,
)
from quantkit.numerics.scheme import CacheScheme, KVScheme
from quantkit.results import CacheChoice, CacheLayerChoice
from quantkit.runtime.engine.assembly import build_engine
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.cache_schemes import StoredCache
from quantkit.runtime.model.model import NativeModel

_KEYS = (INT8_CHANNEL, INT4_CHANNEL, INT3_CHANNEL)  # from the most bits to the fewest
_VALUES = (INT8_TOKEN, INT4_TOKEN, INT3_TOKEN, INT2_TOKEN)
MAX_TOKENS = 2048  # of text: every token is computed in a step of its own, as in decoding
_UNIFORM = 2  # caches with the same types in all layers that are measured beside the choice

_Types = dict[int, KVScheme]  # schemes of the layers that are quantized, keyed by layer


class CacheSearch:
    """Measures caches of one model, and chooses one.

    Args:
        setup: the original model, which is as before after every call, and the text.
        progress: called with one line per event.
    Raises:
        ModelError: transformers runs the model, or all layers have a sliding window.
    """

    def __init__(self, setup: Setup, progress: Callable[[str], None]) -> None:
        original = setup.original
        self._layers = _quantizable(original)
        if not self._layers:
            raise ModelError(f"{original.path}: quantkit quantizes the cache of no layer of this model")
        self._original, self._state, self._progress = original, setup.state, progress
        self._text, self._held_out = (
            _Text(original, few(windows, original.vocab_size, MAX_TOKENS))
            for windows in (setup.windows, setup.held_out)
        )
        self._count = 0
        self._keys = [key for key in _KEYS if self._fits(KVScheme(key=key))]
        self._values = [value for value in _VALUES if self._fits(KVScheme(value=value))]
        self._elements = sum(2 * layout.num_heads * layout.head_dim for layout in self._layers.values())

    def find(self, bits: float) -> CacheChoice:
        """Return the cache with the least KL.

        Args:
            bits: most stored bits per number, scales included, on average over the layers that can be quantized.
        Raises:
            GateFailure: even the smallest types need more bits.
        """
        groups, budget = self._options(), bits * self._elements / 8
        solved = least_sensitivity(groups, budget)
        if solved is None:
            least = self._bits(groups, tuple(len(group) - 1 for group in groups))
            raise GateFailure(
                f"kv_bits<={bits:g} cannot be reached: the smallest types take {least:.3f}; raise --kv-bits"
            )
        uniform = self._uniform(groups, budget)
        kls = {choice: self._kl(self._name(choice), self._types(choice)) for choice in (*uniform, solved)}
        choice = min(kls, key=lambda one: kls[one])
        types = self._types(choice)
        self._progress("measuring the chosen cache on other text")
        return CacheChoice(
            bits=self._bits(groups, choice),
            layers=tuple(
                CacheLayerChoice(
                    layer=index,
                    keys=_dtype(types[index].key),
                    values=_dtype(types[index].value),
                    key_kl=groups[2 * n][choice[2 * n]].sensitivity,
                    value_kl=groups[2 * n + 1][choice[2 * n + 1]].sensitivity,
                )
                for n, index in enumerate(self._layers)
            ),
            uniform={self._name(each): kls[each] for each in uniform},
            sum_kl=total(groups, choice).sensitivity,
            search_kl=kls[choice],
            measured_kl=self._measure(self._held_out, types),
        )

    def _options(self) -> list[list[Option]]:
        """Return the options of the keys, then of the values, of each layer in order."""
        every = {side: [self._everywhere(side, one) for one in of] for side, of in self._sides}
        groups = []
        for index, layout in self._layers.items():
            for side, of in self._sides:
                least = self._kl(f"{_dtype(of[-1])} {side} in layer {index}", {index: _beside(side, of[-1])})
                groups.append(
                    [
                        Option(cost=_bytes(layout, one), sensitivity=least * kl / max(every[side][-1], 1e-30))
                        for one, kl in zip(of, every[side], strict=True)
                    ]
                )
        return groups

    def _everywhere(self, side: str, scheme: CacheScheme) -> float:
        return self._kl(f"{_dtype(scheme)} {side} in all layers", dict.fromkeys(self._layers, _beside(side, scheme)))

    def _uniform(self, groups: Sequence[Sequence[Option]], budget: float) -> list[Choice]:
        """Return the choices with the same types in all layers that fit and promise the least KL."""
        pairs = itertools.product(range(len(self._keys)), range(len(self._values)))
        fitting = [choice for pair in pairs if total(groups, choice := pair * len(self._layers)).cost <= budget]
        return sorted(fitting, key=lambda choice: total(groups, choice).sensitivity)[:_UNIFORM]

    @property
    def _sides(self) -> tuple[tuple[str, list[CacheScheme]], ...]:
        return ("keys", self._keys), ("values", self._values)

    def _types(self, choice: Choice) -> _Types:
        pairs = zip(choice[::2], choice[1::2], strict=True)
        return {
            index: KVScheme(key=self._keys[key], value=self._values[value])
            for index, (key, value) in zip(self._layers, pairs, strict=True)
        }

    def _name(self, choice: Choice) -> str:
        """Return the types, or the types of each layer if they differ."""
        names = [f"{_dtype(one.key)} keys and {_dtype(one.value)} values" for one in self._types(choice).values()]
        return names[0] if len(set(names)) == 1 else "; ".join(names)

    def _bits(self, groups: Sequence[Sequence[Option]], choice: Choice) -> float:
        return 8 * total(groups, choice).cost / self._elements

    def _fits(self, scheme: KVScheme) -> bool:
        """Whether the heads of all layers have a width that the scheme can store."""
        try:
            for layout in self._layers.values():
                replace(layout, cache=LayerCache(scheme=scheme))
        except SchemeError:
            return False
        return True

    def _kl(self, name: str, types: _Types) -> float:
        """Measure the KL of a cache on the text of the search, unless an earlier search measured it."""

        def measure() -> float:
            what = name if ";" not in name else "types that differ by layer"
            self._progress(f"{self._count} of {number}: KL of a cache with {what}")
            return self._measure(self._text, types)

        self._count += 1
        number = len(self._keys) + len(self._values) + 2 * len(self._layers) + _UNIFORM + 1
        return self._state.get(f"cache with {name}", measure)

    def _measure(self, text: "_Text", types: _Types) -> float:
        with _cached_as(self._original, types, text.windows):
            return text.kl(self._original)


class _Text:
    """Windows of a text, with the logits of the original, as it is now, after every token."""

    def __init__(self, original: LLM, windows: Windows) -> None:
        self.windows = windows
        self._logits = [logits for group in batches(original, windows) for logits in window_logits(original, group)]

    def kl(self, llm: LLM) -> float:
        """Return the mean KL of a model that reads all windows at once, one token per step."""
        counts, compared = [0] * len(self.windows), list[Distances]()
        for index, rows in llm.score_rows(self.windows, chunk_size=1):
            start = counts[index]
            counts[index] += len(rows)
            compared.append(distances(self._logits[index][start : counts[index]], rows))
        return join_distances(compared).mean


def check_cache_search(model: str | None, recipe: Recipe) -> None:
    """Refuse a model or a format before any work.

    Args:
        model: directory or hub id; None = the demo model.
        recipe: recipe that will hold the result.
    Raises:
        ModelError: the model caches something other than keys and values.
        SchemeError: the recipe's format cannot describe a KV cache.
    """
    config = CheckpointReader(resolve(model)).config
    check_cache(recipe_with_cache(recipe, {"dtype": "int4", "outliers": "off"}), config)


def recipe_with_cache(recipe: Recipe, section: dict[str, Any], **fields: Any) -> Recipe:
    """Return the recipe with a `kv_cache:` that needs no data, and with further fields."""
    linear = recipe.scheme.default
    if not recipe.steps and (linear is None or linear.activation is None or not linear.activation.is_calibrated):
        fields["calibration"] = None
    return build(patched(recipe.source, {"kv_cache": section, **fields}), recipe.name)


def cache_section(choice: CacheChoice) -> dict[str, Any]:
    """Return the `kv_cache:` of a recipe with the chosen types."""
    pairs = [(layer.keys, layer.values) for layer in choice.layers]
    usual = max(pairs, key=pairs.count)
    others = defaultdict[tuple[str, str], list[int]](list)
    for layer, pair in zip(choice.layers, pairs, strict=True):
        if pair != usual:
            others[pair].append(layer.layer)
    entries = [{"numbers": numbers, **_pair(pair)} for pair, numbers in others.items()]
    return {"dtype": usual[0], **_pair(usual), "outliers": "off", **({"layers": entries} if entries else {})}


def _pair(pair: tuple[str, str]) -> dict[str, Any]:
    return {"keys": {"dtype": pair[0]}, "values": {"dtype": pair[1]}}


def _quantizable(llm: LLM) -> dict[int, KVLayout]:
    """Return the layout of each layer whose cache the engine would quantize, keyed by number."""
    cache = llm.engine.runner.cache
    layouts = list(enumerate(cache.layouts)) if cache is not None and isinstance(llm.model, NativeModel) else []
    return {
        index: layout
        for index, layout in layouts
        if isinstance(layout, KVLayout) and not layout.is_windowed and not layout.rope_dim
    }


@contextmanager
def _cached_as(llm: LLM, types: _Types, windows: Windows) -> Iterator[None]:
    """Run a model inside the block with another cache, which has room for these windows at once."""
    model = llm.model
    assert isinstance(model, NativeModel)
    kept, count = model.stored_cache, model.config.num_layers
    schemes = tuple(types.get(index, UNQUANTIZED) for index in range(count))
    try:
        model.stored_cache = StoredCache(schemes=schemes, scales=(None,) * count)
        pages = sum(-(-len(window) // DEFAULT_PAGE_SIZE) for window in windows)
        sizes: dict[str, Any] = {"page_size": DEFAULT_PAGE_SIZE, "num_pages": pages, "max_sequences": len(windows)}
        config = replace(llm.config, kv_cache="auto", max_length=None, **sizes)
        before = llm.exchange(build_engine(model, config))
        try:
            yield
        finally:
            llm.exchange(before)
    finally:
        model.stored_cache = kept


def _beside(side: str, scheme: CacheScheme) -> KVScheme:
    """Return a scheme with one side in 8 bits, which costs next to nothing, so that its KL is that of the other side.

    Without 8-bit keys, values would not wait in a residual window as they will.
    """
    keys, values = (scheme, INT8_TOKEN) if side == "keys" else (INT8_CHANNEL, scheme)
    return KVScheme(key=keys, value=values)


def _bytes(layout: KVLayout, scheme: CacheScheme) -> float:
    """Return the bytes of one token's keys or values in a layer."""
    return layout.num_heads * side_of(scheme, layout.dtype.itemsize).token_bytes(layout.head_dim)


def _dtype(scheme: CacheScheme) -> str:
    assert scheme.dtype is not None
    return scheme.dtype.name
