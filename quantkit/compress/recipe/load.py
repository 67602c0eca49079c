"""Build a Recipe from a name or a file: look up every name, fill in every default and build every step.

All mistakes in a recipe that do not depend on the model are reported here.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quantkit import demo
from quantkit.compress.algorithms.base import Step, follows_original
from quantkit.compress.recipe import sections
from quantkit.compress.recipe.override import Overrides, patched
from quantkit.compress.recipe.schema import CalibrationSection, Document, Override, as_recipe_error, validate
from quantkit.errors import RecipeError, suggestion
from quantkit.formats import REGISTRY as FORMATS
from quantkit.formats.compressed_tensors import FORMAT as COMPRESSED_TENSORS
from quantkit.formats.gguf import FORMAT as GGUF
from quantkit.formats.gguf import MATRIX_BLOCKS
from quantkit.numerics.kv_cache import CacheGoal
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme
from quantkit.results.gates import parse_gate
from quantkit.safety.untrusted import parse_yaml, read_text, shorten

_W4AFP8 = ("int4", "fp8")  # the one pair of integers and floats that engines have kernels for


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Instructions for compressing a model.

    Args:
        name: short name, also part of the default output directory.
        description: what the recipe does, when to use it, what it costs.
        gates: quality thresholds that `verify` checks, e.g. `recovery>=98.9`; they do not affect the checkpoint.
        measured: KL that a search measured, and the text that it used; None = no search wrote the recipe.
        scheme: scheme of each linear. `symmetric: auto` means zero points here, until `settled` replaces it.
        kv_cache: number types of keys and values; None = the recipe does not set them.
        mtp: scheme of the linears in the decoder layers of MTP heads; they are rounded to nearest. None = these linears
            stay as in the source.
        steps: algorithms that choose the codes, keyed by name, in execution order; empty = round to nearest.
        calibration: calibration data; None = no step needs data.
        input_clip: how static scales of inputs are chosen, "absmax" or "mse".
        format: on-disk format.
        embedding: type of the embedding and the head in a GGUF file; None = as in the source.
        imatrix: path of an importance matrix of llama.cpp: the mean square of each input of each linear, which weights
            the input's squared rounding errors. None = all inputs count equally.
        seed: seed of all random choices.
        source: the recipe as plain data with every default filled in, without description, gates and `measured`.
            Recipes with equal sources give equal checkpoints. `build` makes this recipe again from its source.
    """

    name: str
    description: str
    gates: tuple[str, ...] = ()
    measured: Mapping[str, Any] | None = None
    scheme: Scheme
    kv_cache: CacheGoal | None = None
    mtp: LinearScheme | None = None
    steps: Mapping[str, Step]
    calibration: CalibrationSection | None
    input_clip: Literal["absmax", "mse"] = "absmax"
    format: str
    embedding: str | None = None
    imatrix: str | None = None
    seed: int
    source: dict[str, Any]

    @property
    def has_images(self) -> bool:
        """Whether calibration samples have images; such samples pass additional tensors to the layers."""
        return self.calibration is not None and self.calibration.images is not None

    @property
    def has_original_inputs(self) -> bool:
        """Whether layers are calibrated on their inputs in the original model."""
        return self.calibration is not None and self.calibration.inputs == "original"


class _NoUseOfDataError(RecipeError):
    """The recipe has a `calibration` section, but nothing in it needs data."""


def shipped() -> dict[str, Path]:
    """Return the recipe files that come with quantkit, keyed by recipe name."""
    files = demo.bundled_folder("recipes").glob("*.yaml")
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def load(name_or_path: str | Path, overrides: Overrides = ()) -> Recipe:
    """Read a recipe.

    Args:
        name_or_path: name of a shipped recipe, or path of a .yaml file. If a copied
            file still has a shipped recipe's `name`, the recipe is named after the file.
        overrides: new values of fields, keyed by dotted path, or `path=value` strings with YAML values.
    Raises:
        RecipeError: the recipe does not exist or has a mistake; the message gives file, dotted path, value and valid
            values.
    """
    path = _locate(str(name_or_path))
    data = parse_yaml(read_text(path, RecipeError), path.name, RecipeError)
    if data is None:
        raise RecipeError(f"{path.name}: the file is empty; a recipe needs at least 'weights'")
    if not isinstance(data, dict):
        raise RecipeError(f"{path.name}: expected keys such as 'weights: ...', found {shorten(data)}")
    data.setdefault("name", path.stem)
    if data["name"] != path.stem and str(data["name"]) in shipped():
        data["name"] = path.stem  # with its old name, a copy would look like the original, also in ./<model>-<name>
    try:
        return build(patched(data, overrides), path.name)
    except _NoUseOfDataError:
        if "calibration" in data:
            raise
        raise RecipeError(
            f"recipe {data['name']!r} uses no calibration data, so calibration settings have no effect; leave "
            "out --samples, --calibration, --sequence-length and calibration.*, or use a recipe that has steps, such "
            "as gptq-int4"
        ) from None


def build(data: Mapping[str, Any], where: str) -> Recipe:
    """Build a recipe from plain data.

    Args:
        data: contents of a recipe file, or the `source` of a recipe.
        where: origin of the data, for messages.
    Raises:
        RecipeError: see `load`.
    """
    with as_recipe_error(where):
        document = validate(Document, data)
        _check_parts(document)
        steps = sections.build_steps(document.steps)
        source = _source(document, steps)
        scheme = _scheme(source)
        kv_cache = None if document.kv_cache is None else sections.build_cache(document.kv_cache)
        activation = None if scheme.default is None else scheme.default.activation
        reads_data = bool(steps) or (kv_cache is not None and kv_cache.needs_data)
        if document.imatrix and reads_data:
            raise RecipeError(
                "imatrix: cannot be combined with steps or a KV cache that need calibration data; remove imatrix, or "
                "remove steps and kv_cache"
            )
        calibration = _calibration(document, steps, reads_data or (activation is not None and activation.is_calibrated))
        source["calibration"] = None if calibration is None else calibration.plain
        with as_recipe_error("gates"):
            gates = tuple(gate.text for gate in map(parse_gate, document.gates))
        return Recipe(
            name=document.name,
            description=" ".join(document.description.split()),
            scheme=scheme,
            steps=steps,
            calibration=calibration,
            format=source["format"],
            embedding=document.embedding or None,
            imatrix=document.imatrix or None,
            seed=document.seed,
            source={key: value for key, value in source.items() if value is not None},
            input_clip="absmax" if document.activations is None else document.activations.clip,
            gates=gates,
            measured=None if document.measured is None else document.measured.model_dump(),
            kv_cache=kv_cache,
            mtp=_mtp_scheme(source),
        )


def settled(recipe: Recipe, *, symmetric: bool) -> Recipe:
    """Return the recipe with `symmetric: auto` replaced by the argument `symmetric`, or by true if the weights cannot
    have zero points. Return the same object if the recipe does not use `auto`.
    """
    parts = [recipe.source, *recipe.source["overrides"]]
    if not any(part.get("weights", {}).get("symmetric") == "auto" for part in parts):
        return recipe
    source = {**recipe.source, **_settled(recipe.source, symmetric)}
    source["overrides"] = [_settled(part, symmetric) for part in source["overrides"]]
    return replace(recipe, source=source, scheme=_scheme({"activations": None, **source}))


def _settled(part: Mapping[str, Any], symmetric: bool) -> dict[str, Any]:
    weights = part.get("weights")
    if weights is None or weights["symmetric"] != "auto":
        return dict(part)
    zero_points = not symmetric and not sections.weight_scheme(weights, "weights").symmetric
    return {**part, "weights": {**weights, "symmetric": not zero_points}}


def regrouped(recipe: Recipe, old: int, new: int) -> Recipe:
    """Return the recipe with `group_size: old` replaced by `new` everywhere, except where the size is strict."""

    def part(fields: Mapping[str, Any]) -> dict[str, Any]:
        weights = fields.get("weights") or {}
        return {**fields, **({"weights": {**weights, "group_size": new}} if weights.get("group_size") == old else {})}

    source = {**part(recipe.source), "overrides": [part(override) for override in recipe.source["overrides"]]}
    return replace(recipe, source=source, scheme=_scheme({"activations": None, **source}))


def with_samples(recipe: Recipe, num_inputs: int) -> Recipe:
    """Return the recipe with `calibration.samples: auto` replaced by a number; see `CalibrationSection`.

    Args:
        recipe: the recipe; the same object is returned if it does not use `auto`.
        num_inputs: number of inputs of the widest linear to quantize.
    """
    calibration = recipe.calibration
    if calibration is None or calibration.samples != "auto":
        return recipe
    calibration = calibration.model_copy(update={"samples": calibration.enough_samples(num_inputs)})
    return replace(recipe, calibration=calibration, source={**recipe.source, "calibration": calibration.plain})


def check(path: str | Path) -> list[str]:
    """Read a recipe and return remarks about settings that are valid but probably mistakes.

    Args:
        path: name of a shipped recipe, or a file.
    Returns:
        One sentence per remark.
    Raises:
        RecipeError: see `load`.
    """
    recipe = load(path)
    names, scheme, remarks = tuple(recipe.steps), recipe.scheme.default, []
    helps = next((name for name, step in recipe.steps.items() if step.is_for_activations), None)
    if helps is not None and scheme is not None and scheme.activation is None:
        remarks.append(
            f"{helps} makes activations easier to quantize, but 'activations' is not set; set it, or remove {helps}"
        )
    first = next((name for name, step in recipe.steps.items() if step.fixes_codes), None)
    if first is not None and names[-1] != first:
        late = ", ".join(names[names.index(first) + 1 :])
        remarks.append(f"{first} fixes the codes, so later steps ({late}) have no effect; move {first} to the end")
    if scheme is not None and scheme.activation is not None:
        weights, inputs = scheme.weight.dtype, scheme.activation.dtype
        if weights.kind != inputs.kind and (weights.name, inputs.name) != _W4AFP8:
            pair = f"{weights.name} weights with {inputs.name} activations"
            remarks.append(f"{pair}: few engines multiply integers by floats; use integers or floats for both")
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


def _source(document: Document, steps: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings that affect the checkpoint, as plain data with every default filled in; None for each section
    that the recipe lacks.
    """
    with as_recipe_error("format"):
        format_ = FORMATS.find(document.format)
    weights, activations, cache = document.weights, document.activations, document.kv_cache
    return {
        "name": document.name,
        "weights": None if weights is None else sections.weight_fields(weights),
        "activations": None if activations is None else sections.activation_fields(activations),
        "kv_cache": None if cache is None else sections.cache_fields(cache),
        "mtp": None if document.mtp is None else sections.weight_fields(document.mtp),
        "ignore": list(document.ignore),
        "overrides": [_completed(document, override, index) for index, override in enumerate(document.overrides)],
        "steps": [{name: asdict(step)} for name, step in steps.items()],
        "calibration": None,
        "format": format_,
        "embedding": _embedding(document.embedding or None, format_),
        "imatrix": document.imatrix or None,
        "seed": document.seed,
    }


def _mtp_scheme(source: Mapping[str, Any]) -> LinearScheme | None:
    """Return the scheme of the linears in MTP heads; None = they stay as in the source.

    Raises:
        RecipeError: the format cannot store MTP heads in a separate scheme, or heads cannot have this scheme.
    """
    fields, format_ = source["mtp"], source["format"]
    if fields is None:
        return None
    if format_ != COMPRESSED_TENSORS.name:
        raise RecipeError(
            f"mtp: only format {COMPRESSED_TENSORS.name} can store MTP heads in a separate scheme, but the format is "
            f"{format_}; remove 'mtp' (heads are then copied), or change the format"
        )
    scheme = sections.weight_scheme(fields, "mtp")
    if scheme.has_tensor_scale or fields["symmetric"] == "auto":
        raise RecipeError(
            f"mtp: MTP heads need a scale per channel, group or block, and 'symmetric' must be true or false, found "
            f"{scheme.describe()}; use int8"
        )
    return LinearScheme(weight=scheme)


def _embedding(name: str | None, format_: str) -> str | None:
    """Check the number type that a recipe gives the embedding and the head of a GGUF file, and return it."""
    if name is not None and format_ != GGUF.name:
        raise RecipeError(
            f"embedding: only format gguf can store the embedding in a different type, but the format is {format_}; "
            "remove 'embedding'"
        )
    if name is not None and name not in MATRIX_BLOCKS:
        hint = suggestion(name, MATRIX_BLOCKS)
        raise RecipeError(f"embedding: expected one of {', '.join(MATRIX_BLOCKS)}, found {shorten(name)}{hint}")
    return name


def _completed(document: Document, override: Override, index: int) -> dict[str, Any]:
    """Return one override as plain data; fields missing in its `weights` are taken from the recipe's `weights`."""
    modules = list(override.modules)
    if not modules:
        raise RecipeError(f"overrides[{index}].modules: the list is empty; name at least one pattern")
    kept = {} if override.keep is None else {"keep": override.keep}
    if override.weights is None:
        return {"modules": modules, **(kept or {"skip": True})}
    if document.weights is None:
        raise RecipeError(
            f"overrides[{index}].weights changes the recipe's 'weights', but the recipe has none; add 'weights'"
        )
    return {"modules": modules, "weights": sections.changed_weights(document.weights, override.weights), **kept}


def _scheme(source: Mapping[str, Any]) -> Scheme:
    fields = source["activations"]
    activation = None if fields is None else sections.activation_scheme(fields)

    def linear(weights: dict[str, Any] | None, path: str) -> LinearScheme | None:
        if weights is None:
            return None
        scheme = LinearScheme(weight=sections.weight_scheme(weights, path), activation=activation)
        pair = scheme.weight.dtype.name, None if activation is None else activation.dtype.name
        # Kernels of this pair store group scales in 8 bits, so choose scales that 8 bits hold exactly.
        if pair == _W4AFP8 and scheme.weight.group_size:
            scheme = replace(scheme, weight=replace(scheme.weight, row_scales="e4m3"))
        return scheme

    default = linear(source["weights"], "weights")
    rules: list[Rule] = []
    for index, override in enumerate(source["overrides"]):
        chosen = linear(override.get("weights"), f"overrides[{index}].weights")
        keep = override.get("keep") is not None
        rules += [Rule(pattern=pattern, linear=chosen, keep=keep) for pattern in override["modules"]]
    # The last rule wins. `ignore` comes last, so it applies whatever an override says.
    rules += [Rule(pattern=pattern, linear=None) for pattern in source["ignore"]]
    return Scheme(default=default, rules=tuple(rules))


def _check_parts(document: Document) -> None:
    """Check which sections are present: `weights` may be missing only if the recipe quantizes only the KV cache."""
    if document.weights is not None:
        return
    if document.kv_cache is None:
        raise RecipeError("weights: is required but missing")
    for name in ("activations", "steps"):
        if getattr(document, name):
            raise RecipeError(f"{name}: has no effect without 'weights'; add 'weights' or remove '{name}'")


def _calibration(document: Document, steps: Mapping[str, Step], needs_data: bool) -> CalibrationSection | None:
    given = document.calibration
    if needs_data and given is not None and given.inputs == "original" and follows_original(steps.values()):
        raise RecipeError(
            "calibration.inputs: 'original' cannot be combined with a step that compares with the original model; "
            "leave calibration.inputs out, or set steps.gptq.asymmetric_calibration=0 (autoround always compares)"
        )
    if needs_data:
        return given or CalibrationSection()
    if given is not None:
        raise _NoUseOfDataError(
            "calibration has no effect without steps or calibrated scales; remove it, or add a step such as gptq"
        )
    return None
