"""Estimate a model's sizes, what fits on a device, lower bounds on time, and a recipe's effect; nothing is measured."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit.engine_rules import find_engine, judge, judge_all
from quantkit.engine_rules.data_sheets import Device
from quantkit.errors import InputError, RecipeError, suggestion
from quantkit.models.kv_budget import KVBudget, fitting_page_size
from quantkit.models.kv_sizes import BF16, DEFAULT_PAGE_SIZE, FP8, INT4, INT8, KV_FORMS, KVForm, find_kv_form
from quantkit.planning import memory
from quantkit.planning.limits import (
    EVERYTHING,
    STEP_TOKENS,
    DeviceFit,
    Eviction,
    Floor,
    decode_floor,
    device_fit,
    prefill_floor,
)
from quantkit.planning.recipes import RecipePlan, plan_recipe
from quantkit.planning.shape import ModelShape
from quantkit.planning.source import from_model, from_parameters, from_shape_file
from quantkit.quantities import parse_budget
from quantkit.results import EngineReading
from quantkit.runtime.cache import policies

DEFAULT_CONTEXT = 4096
HEADS = {"int8": memory.INT8_WEIGHTS, "int4": memory.INT4_WEIGHTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRow:
    """Size of the weights under one scheme. If the scheme is impossible, `problem` says why; ignore `size` then."""

    scheme: memory.WeightChoice
    size: memory.WeightBytes
    problem: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRow:
    """Bytes of the KV cache in one form: per token of a short context, and per sequence of the given context."""

    form: KVForm
    per_token: float
    per_sequence: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRow:
    """Memory use and least times on the device for one pair of a weight scheme and a cache form.

    `form` is None if the cache is unknown. `decode` is None if the device's bandwidth is unknown, and `prefill` is None
    if the device's peak rates are unknown.
    """

    scheme: memory.WeightChoice
    form: KVForm | None
    fit: DeviceFit
    decode: Floor | None
    prefill: Floor | None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimates of the memory and time that a model needs; each figure is computed on access.

    Args:
        shape: shape of the model.
        context, batch, prompt: tokens per sequence, number of sequences, and prompt tokens of the prefill.
        schemes, forms: number types of weights and caches to compare.
        device: the device; None = none was given.
        recipe: the recipe; None = none was given.
        engine: engine that will read the result; None = report on every engine.
        eviction: which tokens of each sequence the cache keeps.
    """

    shape: ModelShape
    context: int
    batch: int
    prompt: int
    schemes: tuple[memory.WeightChoice, ...]
    forms: tuple[KVForm, ...]
    device: Device | None
    recipe: RecipePlan | None
    engine: str | None = None
    eviction: Eviction = EVERYTHING

    @property
    def kept(self) -> int:
        """Tokens in the cache for a sequence of the given context."""
        return self.eviction.kept(self.context)

    @cached_property
    def weights(self) -> tuple[WeightRow, ...]:
        """Size of the weights with each of the `schemes`."""
        shape = self.shape
        return tuple(
            WeightRow(scheme=scheme, size=memory.planned_weight_bytes(shape, scheme), problem=_problem(shape, scheme))
            for scheme in self.schemes
        )

    @property
    def caches(self) -> tuple[CacheRow, ...]:
        """Size of the KV cache with each of the `forms`."""
        return tuple(
            CacheRow(
                form=form,
                per_token=memory.kv_bytes_per_token(self.shape, form),
                per_sequence=memory.kv_bytes(self.shape, self.kept, form),
            )
            for form in self.forms
        )

    @cached_property
    def on_device(self) -> tuple[DeviceRow, ...]:
        """Memory use and least times on the device, for every pair of a weight scheme in `_shown` and a cache form.

        If the model's cache is unknown, there is one row for each weight scheme.
        """
        if self.device is None:
            return ()
        usable = [row.scheme for row in self.weights if row.problem is None]
        if not self.shape.layers:
            return tuple(self._device_row(self.device, scheme, None) for scheme in usable)
        pairs = itertools.product(_shown(usable, self.recipe), self.forms)
        return tuple(self._device_row(self.device, scheme, form) for scheme, form in pairs)

    def _device_row(self, device: Device, scheme: memory.WeightChoice, form: KVForm | None) -> DeviceRow:
        cache = form or find_kv_form("auto", self.shape.dtype)
        sizes: dict[str, Any] = {"context": self.context, "batch": self.batch}
        read: dict[str, Any] = {"context": self.kept, "batch": self.batch}
        return DeviceRow(
            scheme=scheme,
            form=form,
            fit=device_fit(self.shape, scheme, cache, device.memory_bytes, **sizes, eviction=self.eviction),
            decode=decode_floor(self.shape, scheme, cache, device, **read) if device.bandwidth else None,
            prefill=prefill_floor(self.shape, scheme, device, prompt=self.prompt) if device.peaks else None,
        )

    @property
    def activations(self) -> int:
        """Estimated bytes of activations in one step."""
        return memory.planned_activation_bytes(self.shape, STEP_TOKENS, self.batch)

    @property
    def compression(self) -> dict[str, int] | None:
        """Bytes of memory needed to compress the model with the recipe, keyed by purpose; None without a recipe."""
        recipe = self.recipe
        if recipe is None:
            return None
        return memory.compression_bytes(self.shape, recipe.num_tokens, recipe.steps, hands_on=recipe.hands_on)

    @property
    def readings(self) -> list[EngineReading]:
        """Predictions of how engines read the recipe's result, on the device if one is given."""
        if self.recipe is None:
            return []
        stored, capability = self.recipe.stored, None if self.device is None else self.device.capability
        return judge_all(stored, capability) if self.engine is None else [judge(self.engine, stored, capability)]

    @property
    def remarks(self) -> tuple[str, ...]:
        """One sentence about each thing that the figures leave out or assume."""
        return (*self.shape.remarks, *_remarks(self.shape, self.recipe, self.device))


def find_shape(model: str | Path | None, shape_file: str | Path | None, params: str | None) -> ModelShape:
    """Return the shape of the given model, or of the bundled demo model if all arguments are None.

    Raises:
        InputError: several models are given, or the given model cannot be read; see `planning.source`.
    """
    given = [name for name, value in (("MODEL", model), ("--shape", shape_file), ("--params", params)) if value]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} both name a model; give one of them")
    if params:
        return from_parameters(params)
    return from_shape_file(shape_file) if shape_file else from_model(model)


def estimate(
    model: str | Path | None = None,
    *,
    shape_file: str | Path | None = None,
    params: str | None = None,
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    device: Device | None = None,
    context: int | None = None,
    batch: int = 1,
    prompt: int | None = None,
    kv_cache: str | None = None,
    head: str | None = None,
    engine: str | None = None,
    kv_budget: int | float | str | None = None,
    kv_policy: str | None = None,
) -> Estimate:
    """Estimate memory and time for compressing and running a model, before any work.

    Args:
        model: a directory, a config.json or a hub id; None = the bundled demo model.
        shape_file: YAML or JSON with entries of a config.json, instead of a model.
        params: number of parameters, such as `7B` or `30B-A3B`, instead of a model.
        recipe: name of a shipped recipe, or a file; None = compare the usual number types.
        overrides: recipe fields to replace.
        device: see `make_device`; None = sizes only.
        context: tokens per sequence; None = 4096, or the model's limit if that is lower.
        batch: number of sequences.
        prompt: prompt tokens; None = the context.
        kv_cache: number type of the KV cache; None = compare several.
        head: "int8" or "int4" quantizes the output head at load; None = as stored.
        engine: engine that will read the recipe's result; None = report on every engine.
        kv_budget: maximum number of tokens per sequence that the cache keeps, or a share of the context; None = all.
        kv_policy: name of the eviction policy, which decides which tokens the cache keeps.
    Returns:
        The plan.
    Raises:
        InputError: the model, recipe or an option is invalid.
    """
    if engine is not None:
        find_engine(engine)
        if recipe is None:
            raise RecipeError("--engine checks the result of a recipe; give --recipe too")
    shape = find_shape(model, shape_file, params)
    length = context or min(DEFAULT_CONTEXT, shape.max_length or DEFAULT_CONTEXT)
    head_form = _head(head, shape)
    plan = _recipe(shape, recipe, overrides, head_form) if recipe is not None else None
    return Estimate(
        shape=shape,
        context=length,
        batch=batch,
        prompt=prompt or length,
        schemes=tuple(_schemes(shape, plan, head_form)),
        forms=tuple(_forms(shape, kv_cache, shape.cache if plan is None else plan.cache)),
        device=device,
        recipe=plan,
        engine=engine,
        eviction=_eviction(shape, length, kv_budget, kv_policy),
    )


def _eviction(shape: ModelShape, context: int, budget: int | float | str | None, policy: str | None) -> Eviction:
    """Return the eviction settings, interpreted as the runtime does."""
    if budget is None:
        if policy is not None:
            raise InputError(f"kv_policy {policy!r} needs a KV budget; add --kv-budget")
        return EVERYTHING
    if policy is not None:
        policies.REGISTRY.find(policy)
    refused = [
        layer.attention.describe()
        for layer in shape.layers
        if layer.attention.kind in ("dsa", "csa", "hca") or layer.attention.has_rows
    ]
    if refused:
        raise InputError(
            f"kv_budget is not supported for layers of type {refused[0]!r}, because quantkit's runtime cannot evict "
            "tokens from their cache; leave kv_budget out"
        )
    if shape.layers and all(layer.attention.kind == "state" for layer in shape.layers):
        raise InputError(
            "kv_budget is not supported for this model, because its state per sequence has a fixed size and no tokens "
            "to evict; leave kv_budget out"
        )
    eviction = Eviction(budget=parse_budget(budget), policy=policy)
    if (kept := eviction.kept(context)) < context:
        window = max((layer.attention.window or 0 for layer in shape.layers), default=0)
        eviction = replace(eviction, page_size=fitting_page_size(kept, DEFAULT_PAGE_SIZE, window))
        KVBudget(tokens=kept, page_size=eviction.page_size, chunk=STEP_TOKENS, window=window)  # checks the size
    return eviction


def _remarks(shape: ModelShape, plan: RecipePlan | None, device: Device | None) -> Iterator[str]:
    yield from plan.notes if plan else ()
    if any(layer.attention.kind == "window" for layer in shape.layers) and device is not None:
        whole = sum(layer.attention.page_bytes(BF16) for layer in shape.layers) / DEFAULT_PAGE_SIZE
        yield (
            "for sliding-window layers, only the tokens in the window are counted; quantkit's runtime keeps all "
            f"tokens, which takes {whole:,.0f} B per token in 16 bits"
        )
    for compute in sorted({form.compute for form in plan.forms} - {"bf16"}) if plan else ():
        if device is not None and device.peaks and compute not in device.peaks:
            yield f"{device.title} has no {compute} units: products are computed in 16 bits"


def _head(name: str | None, shape: ModelShape) -> memory.WeightForm | None:
    if name is None:
        return None
    if name not in HEADS:
        raise InputError(f"unknown head type {name!r}{suggestion(name, HEADS)}; supported: {', '.join(HEADS)}")
    form = HEADS[name]
    if shape.layers and not form.fits(shape.hidden_size):
        raise InputError(
            f"head {name}: groups of {form.group_size} do not divide {shape.hidden_size} inputs of the head; use int8"
        )
    return form


def _recipe(shape: ModelShape, name: str | Path, overrides: Any, head: memory.WeightForm | None) -> RecipePlan:
    if not shape.layers:
        raise InputError(
            "a recipe needs the model's layers, which --params does not give; give a config.json or --shape instead"
        )
    from quantkit.compress.recipe import load

    plan = plan_recipe(shape, load(name, overrides), head)
    if plan.conflicts:
        rest = f" (and {len(plan.conflicts) - 1} more)" if len(plan.conflicts) > 1 else ""
        raise RecipeError(f"recipe {plan.name!r} cannot be used on this model: {plan.conflicts[0]}{rest}")
    return plan


def _schemes(shape: ModelShape, plan: RecipePlan | None, head: memory.WeightForm | None) -> list[memory.WeightChoice]:
    stored = memory.everywhere(None, head)
    if plan is not None:
        return [stored, plan.scheme]
    if shape.quantized:
        return [stored]
    if not shape.layers:
        plain = (memory.FP32_WEIGHTS, memory.BF16_WEIGHTS, *memory.UNSCALED_WEIGHTS)
        return [memory.everywhere(form) for form in (*plain, *memory.COMPARED_WEIGHTS[2:])]
    wide = [memory.everywhere(memory.BF16_WEIGHTS, head)] if shape.dtype_bytes > 2 else []
    return [stored, *wide, *(memory.everywhere(form, head) for form in memory.COMPARED_WEIGHTS)]


def _shown(schemes: Sequence[memory.WeightChoice], plan: RecipePlan | None) -> list[memory.WeightChoice]:
    """Return the schemes to list for each cache form: as stored, 8 bits and 4 bits, or the recipe's scheme."""
    if plan is not None or len(schemes) < 4:
        return list(schemes)
    names = ("as stored", memory.INT8_WEIGHTS.name, memory.INT4_WEIGHTS.name)
    return [scheme for scheme in schemes if scheme.name in names]


def _forms(shape: ModelShape, name: str | None, own: KVForm | None) -> list[KVForm]:
    """Return the forms of the KV cache to count.

    With `name`, return only that form. Without `name`, return the unquantized form, the form of the recipe or
    checkpoint if there is one, and those of FP8, INT8 and INT4 that the model can use.
    """
    if not shape.layers:
        return []
    plain = find_kv_form("auto", shape.dtype)
    usual = [form for form in (FP8, INT8, INT4) if memory.offers(shape, form)]
    if name is None:
        return [plain, *([] if own is None else [own]), *usual]
    form = own if name == "auto" and own is not None else find_kv_form(name, shape.dtype)
    if not memory.offers(shape, form):
        kind = next(iter(shape.attention_kinds))
        offered = ", ".join(other.name for other in KV_FORMS.values() if memory.offers(shape, other))
        raise InputError(f"no engine stores this model's cache ({kind}) in {name}; use one of {offered}")
    return [form]


def _problem(shape: ModelShape, scheme: memory.WeightChoice) -> str | None:
    for index, layer in enumerate(shape.layers):
        for matrix in layer.matrices:
            form = scheme.choose(index, matrix)
            if form is not None and not form.fits(matrix.in_features):
                return f"groups of {form.group_size} do not divide the {matrix.in_features} inputs of {matrix.first}"
    return None
