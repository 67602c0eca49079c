"""From a name or a file to a Recipe: everything that can be wrong with a recipe alone fails here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit import demo
from quantkit.compress.recipe.base import Recipe
from quantkit.compress.recipe.kv_cache import build_cache, cache_source
from quantkit.compress.recipe.numbers import (
    activation_fields,
    activation_scheme,
    changed_weights,
    weight_fields,
    weight_scheme,
)
from quantkit.compress.recipe.override import Overrides, patched
from quantkit.compress.recipe.schema import CalibrationSection, Document, Override, validate
from quantkit.compress.recipe.steps import build_steps
from quantkit.errors import GateError, RecipeError, suggestion
from quantkit.formats import REGISTRY as FORMATS
from quantkit.numerics.kv_cache import CacheGoal
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme
from quantkit.results.gates.language import parse_gates
from quantkit.untrusted import parse_yaml, read_text, shorten

_FIX_CODES = ("gptq", "autoround")
_W4AFP8 = ("int4", "fp8")  # the one pair of integers and floats that engines have kernels for


class _NoUseOfDataError(RecipeError):
    """Calibration is set and nothing needs data."""


def shipped() -> dict[str, Path]:
    """The recipes that come with quantkit: file by name."""
    return {path.stem: path for path in sorted(demo.shipped("recipes").glob("*.yaml"), key=lambda path: path.stem)}


def load(name_or_path: str | Path, overrides: Overrides = ()) -> Recipe:
    """Read a recipe.

    Args:
        name_or_path: a shipped name, or a path to a .yaml file; a copy that keeps a shipped name is called as its file.
        overrides: fields to replace: values by dotted path, or `path=value` texts with YAML values.
    Raises:
        RecipeError: no such recipe, or a mistake in it; one line with file, dotted path, value and what is valid.
    """
    path = _locate(str(name_or_path))
    data = _parse(read_text(path, RecipeError), path.name)
    data.setdefault("name", path.stem)
    if data["name"] != path.stem and str(data["name"]) in shipped():
        data["name"] = path.stem  # a copy under its old name would be taken for the original, in ./<model>-<name> too
    try:
        return build(patched(data, overrides), path.name)
    except _NoUseOfDataError:
        if "calibration" in data:
            raise
        raise RecipeError(
            f"recipe {data['name']!r} looks at no data, so there is no calibration to change; leave --samples, "
            "--calibration, --sequence-length and calibration.* out, or take a recipe with steps such as gptq-int4"
        ) from None


def _parse(text: str, where: str) -> dict[str, Any]:
    data = parse_yaml(text, where, RecipeError)
    if data is None:
        raise RecipeError(f"{where}: the file is empty; a recipe needs at least 'weights'")
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: expected keys such as 'weights: ...', found {shorten(data)}")
    return data


def build(data: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from plain data.

    Args:
        data: what a recipe file holds, or the `source` of a recipe.
        where: where it comes from, for messages.
    Raises:
        RecipeError: as `load`.
    """
    document = validate(Document, data, where)
    _check_parts(document, where)
    steps, options = build_steps(document.steps, where)
    overrides = [_completed(document, index, where) for index in range(len(document.overrides))]
    scheme, kv_cache = _scheme(document, overrides, where), build_cache(document, where)
    calibration = _calibration(document, bool(steps), scheme, kv_cache, where)
    return Recipe(
        name=document.name,
        description=" ".join(document.description.split()),
        scheme=scheme,
        steps=tuple(steps.values()),
        step_names=tuple(steps),
        calibration=calibration,
        format=_format(document.format, where),
        seed=document.seed,
        source=_source(document, overrides, options, calibration, where),
        input_clip="absmax" if document.activations is None else document.activations.clip,
        gates=_gates(document.gates, where),
        kv_cache=kv_cache,
    )


def check(path: str | Path) -> list[str]:
    """Read a recipe and say what is valid in it but probably not meant.

    Args:
        path: a shipped name or a file.
    Returns:
        remarks: one sentence each; empty when there is nothing to say.
    Raises:
        RecipeError: as `load`.
    """
    recipe = load(path)
    names, scheme, remarks = recipe.step_names, recipe.scheme.default, []
    if "smoothquant" in names and scheme is not None and scheme.activation is None:
        remarks.append("smoothquant makes activations easier to quantize, but 'activations' is not set")
    first = next((name for name in names if name in _FIX_CODES), names[-1] if names else "")
    if names and names[-1] != first:
        late = ", ".join(names[names.index(first) + 1 :])
        remarks.append(
            f"{first} fixes the codes, so the steps after it ({late}) come too late; move {first} to the end"
        )
    if scheme is None:
        return remarks
    mixed = scheme.activation is not None and scheme.activation.dtype.kind != scheme.weight.dtype.kind
    if scheme.activation is not None and mixed and (scheme.weight.dtype.name, scheme.activation.dtype.name) != _W4AFP8:
        pair = f"{scheme.weight.dtype.name} weights with {scheme.activation.dtype.name} activations"
        remarks.append(f"{pair}: few engines multiply integers by floats; use one kind for both")
    return remarks


def _locate(name: str) -> Path:
    known = shipped()
    if name in known:
        return known[name]
    path = Path(name)
    if path.is_file():
        return path
    what = "is neither a shipped recipe nor a file"
    if path.exists():
        what = f"is {'a directory' if path.is_dir() else 'a pipe or a device'}, not a recipe file"
    beside = [str(file) for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = suggestion(str(path), [*known, *sorted(beside)])
    raise RecipeError(f"recipe {name!r} {what}{hint}; shipped: {', '.join(known)}")


def _completed(document: Document, index: int, where: str) -> dict[str, Any]:
    """One override as plain data, its missing fields inherited from `weights`."""
    override: Override = document.overrides[index]
    modules = list(override.modules)
    if not modules:
        raise RecipeError(f"{where}: overrides[{index}].modules: the list is empty; name at least one pattern")
    if override.weights is None:
        return {"modules": modules, "skip": True}
    if document.weights is None:
        raise RecipeError(f"{where}: overrides[{index}].weights: changes 'weights', which the recipe does not have")
    return {"modules": modules, "weights": changed_weights(document.weights, override.weights)}


def _scheme(document: Document, overrides: list[dict[str, Any]], where: str) -> Scheme:
    activation, default = activation_scheme(document.activations, where), None
    if document.weights is not None:
        weight = weight_scheme(weight_fields(document.weights), where, "weights")
        default = LinearScheme(weight=weight, activation=activation)
    rules: list[Rule] = []
    for index, override in enumerate(overrides):
        linear = None
        if "weights" in override:
            weight = weight_scheme(override["weights"], where, f"overrides[{index}].weights")
            linear = LinearScheme(weight=weight, activation=activation)
        rules += [Rule(pattern=pattern, linear=linear) for pattern in override["modules"]]
    # The last rule wins, and what is to be ignored is ignored whatever an override says.
    rules += [Rule(pattern=pattern, linear=None) for pattern in document.ignore]
    return Scheme(default=default, rules=tuple(rules))


def _check_parts(document: Document, where: str) -> None:
    """WeightsSection may only be missing from a recipe that is about the KV cache alone."""
    if document.weights is not None:
        return
    if document.kv_cache is None:
        raise RecipeError(f"{where}: weights: is required but missing")
    for name in ("activations", "steps"):
        if getattr(document, name):
            raise RecipeError(f"{where}: {name}: has no effect without 'weights'; add them or remove it")


def _calibration(
    document: Document, has_steps: bool, scheme: Scheme, kv_cache: CacheGoal | None, where: str
) -> CalibrationSection | None:
    activation = None if scheme.default is None else scheme.default.activation
    needs_data = has_steps or (kv_cache is not None and kv_cache.needs_data)
    if needs_data or (activation is not None and activation.is_calibrated):
        return document.calibration or CalibrationSection()
    if document.calibration is not None:
        raise _NoUseOfDataError(
            f"{where}: calibration has no effect without steps or calibrated scales; remove it, or add a step such "
            "as gptq"
        )
    return None


def _format(name: str, where: str) -> str:
    key, names = name.replace("_", "-"), FORMATS.names()
    if key not in names:
        hint = suggestion(key, names)
        raise RecipeError(f"{where}: format: unknown format {shorten(name)}{hint}; there are: {', '.join(names)}")
    return key


def _gates(texts: tuple[str, ...], where: str) -> tuple[str, ...]:
    try:
        return tuple(gate.text for gate in parse_gates(texts))
    except GateError as error:
        raise RecipeError(f"{where}: gates: {error}") from None


def _source(
    document: Document,
    overrides: list[dict[str, Any]],
    options: dict[str, dict[str, Any]],
    calibration: CalibrationSection | None,
    where: str,
) -> dict[str, Any]:
    source: dict[str, Any] = {"name": document.name}
    if document.weights is not None:
        source["weights"] = weight_fields(document.weights)
    if document.activations is not None:
        source["activations"] = activation_fields(document.activations)
    source |= cache_source(document, where)
    source["ignore"] = list(document.ignore)
    source["overrides"] = overrides
    source["steps"] = [{name: given} for name, given in options.items()]
    if calibration is not None:
        source["calibration"] = calibration.model_dump()
    return {**source, "format": _format(document.format, where), "seed": document.seed}
