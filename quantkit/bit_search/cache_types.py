"""Choose the number types of each layer's keys and values that minimize the KL while decoding, within a number of bits.

Keys and values are the two sides of a cache. A sensitivity is measured on one side of one layer, with the other side in
8 bits. The measured side has its smallest type, because the KL of larger types is hard to tell from rounding in the
computation. The sensitivity with a larger type is estimated: it is smaller by the same factor as the KL of a cache with
this type in all layers. `solve` then chooses as if sensitivities were additive. The search also measures
two caches with the same types in all layers: those with the least expected KL. The best of these three is chosen.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.bit_search.options import SearchOptions
from quantkit.bit_search.setup import REFERENCE_BYTES, Setup
from quantkit.bit_search.solve import Choice, Option, least_sensitivity, total
from quantkit.checkpoints.folder import resolve
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline.kv_cache import check_cache
from quantkit.compress.recipe import Recipe
from quantkit.compress.recipe.load import build
from quantkit.compress.recipe.override import patched
from quantkit.errors import DataError, GateFailure, InputError, ModelError, SchemeError
from quantkit.evaluate.fidelity import Windows
from quantkit.evaluate.sensitivity import Probe, few
from quantkit.kernels.layouts import KVLayout
from quantkit.models.config import NotNative
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
from quantkit.runtime.model.loader import read_headers
from quantkit.runtime.model.model import NativeModel

_KEYS = (INT8_CHANNEL, INT4_CHANNEL, INT3_CHANNEL)  # from the most bits to the fewest
_VALUES = (INT8_TOKEN, INT4_TOKEN, INT3_TOKEN, INT2_TOKEN)
MAX_TOKENS = 2048  # tokens of text; each is computed in a separate step, as in decoding
_UNIFORM = 2  # number of caches with the same types in all layers that are measured besides the solution

_Types = dict[int, KVScheme]  # schemes of the layers that are quantized, keyed by layer


class CacheSearch:
    """Measures KV caches of one model, and chooses the best.

    Args:
        setup: the original model and the text; every call leaves the model unchanged.
        work: folder for the measured numbers.
        progress: called with one line per event.
    Raises:
        ModelError: all layers have a sliding window.
        DataError: no window of the text is longer than a page of the cache.
        ResumeError: the folder holds numbers for a different model, text, version or device.
    Attributes:
        windows, held_out: windows on which caches are compared, and windows on which the chosen cache is measured.
    """

    def __init__(self, setup: Setup, work: Path, progress: Callable[[str], None]) -> None:
        self._original, self._progress = setup.original, progress
        self._layers = _quantizable(self._original)
        if not self._layers:
            raise ModelError(
                f"{self._original.path}: all layers have a sliding window, and the cache of such layers is never "
                "quantized; leave --kv-bits out"
            )
        size = self._original.vocab_size
        self.windows = few(setup.windows, size, MAX_TOKENS, REFERENCE_BYTES)
        self.held_out = few(setup.held_out, size, MAX_TOKENS, REFERENCE_BYTES)
        longest = max(map(len, self.windows))
        if longest <= DEFAULT_PAGE_SIZE:
            raise DataError(
                f"{setup.data}: the longest window has {longest} tokens, but the cache is quantized in pages of "
                f"{DEFAULT_PAGE_SIZE}; give a longer text, or leave --kv-bits out if the model's context is that short"
            )
        # In a separate file, because recipe and calibration change the numbers about weights, but not the KL of a
        # cache.
        self._state = setup.open_state(work / "kv-cache.json", {}, progress, self.windows)
        self._keys = [key for key in _KEYS if self._fits(KVScheme(key=key))]
        self._values = [value for value in _VALUES if self._fits(KVScheme(value=value))]
        self._count, self._total = 0, len(self._keys) + len(self._values) + 2 * len(self._layers) + _UNIFORM + 1
        self._elements = sum(2 * layout.num_heads * layout.head_dim for layout in self._layers.values())

    def find(self, bits: float) -> CacheChoice:
        """Return the cache with the least KL.

        Args:
            bits: maximum stored bits per key or value, scales included, averaged over the layers that can be quantized.
        Raises:
            GateFailure: even the smallest types need more bits.
        """
        least = 8 * sum(_bytes(x, self._keys[-1]) + _bytes(x, self._values[-1]) for x in self._layers.values())
        if least > bits * self._elements * (1 + 1e-12):
            least /= self._elements
            raise GateFailure(
                f"kv_bits<={bits:g} cannot be reached: the smallest types take {least:.3f} bits; raise --kv-bits"
            )
        self._probe = Probe(self._original, self.windows)
        groups, budget = self._options(), bits * self._elements / 8
        solved = least_sensitivity(groups, budget)
        assert solved is not None, "the smallest types fit"
        uniform = self._uniform(groups, budget)
        choices = dict.fromkeys((*uniform, solved))
        self._total = self._count + len(choices)
        kls = {choice: self._kl(self._name(choice), self._types(choice)) for choice in choices}
        choice = min(kls, key=lambda one: kls[one])
        types = self._types(choice)
        self._progress("measuring the chosen cache on other text")
        del self._probe  # free the logits of one text before those of the other are computed
        return CacheChoice(
            bits=8 * total(groups, choice).cost / self._elements,
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
            num_tokens=sum(map(len, self.windows)),
            sum_kl=total(groups, choice).sensitivity,
            search_kl=kls[choice],
            measured_kl=self._measure(Probe(self._original, self.held_out), types, self.held_out),
        )

    def _options(self) -> list[list[Option]]:
        """Return, for each layer in order, the options of its keys, then those of its values, with estimated KLs."""
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
        """Return the choices with the same types in all layers that fit the budget and have the least expected KL."""
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
        """Return a description of the types; it lists the types of every layer if they are not the same everywhere."""
        names = [f"{_dtype(one.key)} keys and {_dtype(one.value)} values" for one in self._types(choice).values()]
        return names[0] if len(set(names)) == 1 else "; ".join(names)

    def _fits(self, scheme: KVScheme) -> bool:
        """Whether a cache with this scheme can store the keys and values of every layer, given their head widths."""
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
            self._progress(f"{self._count} of {self._total}: KL of a cache with {what}")
            return self._measure(self._probe, types, self.windows)

        self._count += 1
        return self._state.get(f"cache with {name}", measure)

    def _measure(self, probe: Probe, types: _Types, windows: Windows) -> float:
        with _cached(self._original, types, windows):
            return probe.compare_decoding(self._original).mean


def check_cache_search(model: str | None, options: SearchOptions) -> None:
    """Refuse a model, a format or engine settings that the search cannot use, before any work.

    Args:
        model: directory or hub id; None = the demo model.
        options: options of the search.
    Raises:
        InputError: the engine settings include one that the search sets itself or cannot use.
        ModelError: transformers runs the model, or the model caches something other than keys and values.
        SchemeError: the recipe's format cannot describe a KV cache.
    """
    if given := {"backend", "kv_cache", "kv_budget", "speculate"} & options.engine.keys():
        raise InputError(f"engine: {min(given)} cannot be set in a search for a KV cache; leave it out")
    reader = CheckpointReader(resolve(model))
    check_cache(recipe_with_cache(options.recipe, {"dtype": "int4", "outliers": "off"}), reader.config)
    try:
        read_headers(reader)
    except NotNative as error:
        raise ModelError(
            f"{reader.path}: quantkit runs this model through transformers, whose KV cache it cannot quantize; "
            "leave --kv-bits out"
        ) from error


def recipe_with_cache(recipe: Recipe, section: dict[str, Any], **fields: Any) -> Recipe:
    """Return the recipe with a `kv_cache:` that needs no calibration data, and with further fields replaced."""
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


def cache_remark(choice: CacheChoice, data: str = "the same text") -> str:
    """Return a sentence about the chosen cache, for the comments of the recipe."""
    kl = f"with unchanged weights, its KL while decoding is {choice.measured_kl:.5f} nats per token on {data}"
    return f"KV cache: {choice.bits:.3f} bits per key or value; {kl}."


def _quantizable(llm: LLM) -> dict[int, KVLayout]:
    """Return the layout of each decoder layer whose cache the engine would quantize, keyed by layer number."""
    cache, model = llm.engine.runner.cache, llm.model
    assert cache is not None and isinstance(model, NativeModel), "`check_cache_search` refuses other models"
    return {
        index: layout
        for index, layout in enumerate(cache.layouts[: model.config.num_layers])
        if isinstance(layout, KVLayout) and not layout.is_windowed
    }


@contextmanager
def cached_as(llm: LLM, choice: CacheChoice | None, windows: Windows) -> Iterator[None]:
    """Give a model the KV cache of `choice` inside the `with` block, large enough for all windows at once. If `choice`
    is None, nothing changes.
    """
    if choice is None:
        yield
        return
    keys, values = ({_dtype(scheme): scheme for scheme in of} for of in (_KEYS, _VALUES))
    types = {layer.layer: KVScheme(key=keys[layer.keys], value=values[layer.values]) for layer in choice.layers}
    with _cached(llm, types, windows):
        yield


@contextmanager
def _cached(llm: LLM, types: _Types, windows: Windows) -> Iterator[None]:
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
    """Return a cache scheme for one side, with the other side in 8 bits.

    8 bits cost almost no KL, so the KL of the cache is that of the given side. Keys are never left unquantized: without
    quantized keys, values would not wait in a residual window, as they do in the chosen cache.
    """
    keys, values = (scheme, INT8_TOKEN) if side == "keys" else (INT8_CHANNEL, scheme)
    return KVScheme(key=keys, value=values)


def _bytes(layout: KVLayout, scheme: CacheScheme) -> float:
    """Return the bytes of one token's keys or values in a layer."""
    return layout.num_heads * side_of(scheme, layout.dtype.itemsize).token_bytes(layout.head_dim)


def _dtype(scheme: CacheScheme) -> str:
    assert scheme.dtype is not None
    return scheme.dtype.name
