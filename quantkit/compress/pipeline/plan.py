"""Plan a run before the first tensor is read: the scheme of every linear, and whether model, recipe and format fit
together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path

import torch

from quantkit.checkpoints.adapter import Adapter, merge_note, merged, read_adapter
from quantkit.checkpoints.dense_source import open_dense
from quantkit.checkpoints.folder import metadata_files, resolve
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.mtp_heads import find_heads
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.algorithms.base import steps_bytes
from quantkit.compress.discovery.discover import Discovery, discover
from quantkit.compress.pipeline.kept_codes import check_kept
from quantkit.compress.pipeline.kv_cache import check_cache
from quantkit.compress.pipeline.loadability import keep_loadable
from quantkit.compress.recipe import Recipe
from quantkit.compress.recipe.assignment import Assigned, fit
from quantkit.compress.recipe.linears import LayerLinears, Schemes
from quantkit.errors import ModelError
from quantkit.formats import REGISTRY as FORMATS
from quantkit.formats.base import FLOAT_DTYPES, Format
from quantkit.huggingface.load_rules import with_tower_names
from quantkit.huggingface.skeleton import Skeleton
from quantkit.machine.devices import fast_cpu_dtype, pick_device
from quantkit.models.config import NotNative
from quantkit.models.families import find
from quantkit.models.family import Family
from quantkit.models.linear_sets import LinearSet, split_experts
from quantkit.models.mtp import head_tensors
from quantkit.numerics.scheme import LinearScheme
from quantkit.output.staging import check_apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One compression, checked and ready to run.

    Args:
        model: directory or hub id as given; "demo" for the bundled model.
        source: reader of the model's files, with the adapter merged.
        reader: reader of the model that the steps work on, e.g. of the rotated model.
        skeleton, family: that model without its weights, and its description.
        recipe, format: the recipe, and the format of the output.
        layers: for each decoder layer, the schemes of the linears to quantize, keyed by relative name.
        linears: scheme of each linear to quantize, in layers and towers, keyed by full name.
        ignored: full names of the unquantized linears, including the head.
        towers: schemes of the linears to quantize in towers and MTP heads, keyed by the full name of the module that
            contains them, then by relative name.
        heads: number of quantizable linears of each MTP head, keyed by the full name of its decoder layer.
        source_dtype: widest dtype of the layers' weights in the files.
        output: directory of the finished checkpoint.
        warnings: warnings for the user, one sentence each, such as engines that cannot load the result.
        discovery: structure found in a model without a family file; None if the model has one.
        adapter: adapter that is merged into the model; None = no adapter.
    """

    model: str
    source: CheckpointReader
    reader: ModelReader
    skeleton: Skeleton
    family: Family
    recipe: Recipe
    format: Format
    layers: tuple[dict[str, LinearScheme], ...]
    linears: dict[str, LinearScheme]
    ignored: tuple[str, ...]
    source_dtype: torch.dtype
    output: Path
    towers: dict[str, dict[str, LinearScheme]] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    discovery: Discovery | None = None
    adapter: Adapter | None = None

    @property
    def all_tokens(self) -> bool:
        """Whether statistics of experts use all tokens, not only those routed to the expert."""
        return self.recipe.calibration is None or self.recipe.calibration.experts == "all"

    def scale_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a linear's scales: that of its source weight if the format allows it, else the format's
        first.
        """
        source, dtypes = self.reader.info(f"{name}.weight").dtype, self.format.scale_dtypes
        return source if source in dtypes else dtypes[0]

    def sets(self, index: int) -> tuple[LinearSet, ...]:
        """Return the sets of linears of a layer; the linears of a set share the statistics of their inputs."""
        sets = self.skeleton.linear_sets(index)
        return sets if self.all_tokens else split_experts(sets)

    @property
    def rest(self) -> list[str]:
        """Return the names of the tensors outside the decoder layers that are copied unchanged."""
        prefixes = tuple(f"{self.skeleton.layer_name(i)}." for i in range(self.skeleton.num_layers))
        towers = {f"{owner}.{name}.weight" for owner, schemes in self.towers.items() for name in schemes}
        return [name for name in self.reader.names if not name.startswith(prefixes) and name not in towers]


def build_plan(
    model: str | None,
    recipe: Recipe,
    output: str | Path | None,
    device: str,
    engine: str | None = None,
    adapter: str | Path | None = None,
) -> Plan:
    """Check that model, recipe and format fit together, and return the plan.

    Args:
        model: directory or hub id; None = the bundled demo model.
        recipe: the recipe.
        output: directory to create; None = `<model>-<recipe>` in the current directory.
        device: "auto", "cpu", "cuda" or "cuda:<i>".
        engine: engine that must be able to read the result; None = no particular engine.
        adapter: folder of an adapter to merge into the model; None = no adapter.
    Raises:
        ModelError, CheckpointError, RecipeError, SchemeError: model, recipe and format do not fit together.
    """
    source, family, discovery, merging = _open_source(model, recipe, adapter)
    reader = _open(source, family, recipe, described=discovery is None)
    target, dtype = pick_device(device), _source_dtype(reader, family)
    skeleton = Skeleton(reader, family, pick_compute_dtype(dtype, target), target)
    skeleton.check_tensors()
    parts = _layer_linears(skeleton)
    inside = {f"{part.name}.{name}" for part in parts for name in part.shapes}
    if discovery is not None and skeleton.tower_linears() and any(recipe.scheme.unmatched(inside)):
        reader, skeleton = _open_towers(source, skeleton)
        family, parts = skeleton.family, [*parts, *_tower_linears(skeleton, reader)]
    parts += _head_linears(reader)
    format_ = FORMATS.load(recipe.format)
    ignored = partial(_all_ignored, skeleton, parts)
    leave = Assigned if discovery is None else partial(keep_loadable, reader, format_, parts, ignored)
    stored = partial(_stored_in, reader)
    recipe, made = fit(recipe, family, parts, stored, leave, engine=engine, hidden_size=skeleton.hidden_size)
    layers = [{name: scheme for name, scheme in schemes.items() if scheme} for schemes in made.schemes]
    by_part = list(zip(parts, layers, strict=True))
    linears = {f"{part.name}.{n}": scheme for part, layer in by_part for n, scheme in layer.items()}
    kept = check_kept(recipe, reader, format_, {n: scheme for n, scheme in linears.items() if n in inside})
    known = () if discovery is None else (discovery.summary,)
    return Plan(
        model="demo" if model is None else model,
        source=source,
        adapter=merging,
        reader=reader,
        skeleton=skeleton,
        family=replace(family, decode_at_load=family.decode_at_load or made.dequantize),
        recipe=recipe,
        format=format_,
        warnings=(*known, *made.warnings, *_of_source(reader, merging), *_of_heads(recipe, parts), *kept),
        layers=tuple(layer for part, layer in by_part if not part.beside),
        linears=linears,
        towers={part.name: layer for part, layer in by_part if part.beside and layer},
        heads={part.name: len(part.shapes) for part in parts if part.is_head},
        ignored=ignored(made.schemes),
        source_dtype=dtype,
        output=_target(model, source, recipe, output),
        discovery=discovery,
    )


def _open_source(
    model: str | None, recipe: Recipe, adapter: str | Path | None
) -> tuple[CheckpointReader, Family, Discovery | None, Adapter | None]:
    """Open the model and merge the adapter. Return `source`, `family`, `discovery` and `adapter`, see `Plan`."""
    from quantkit.inspection import merged_digests, refuse_merged  # imports the gguf package

    source, merging = open_dense(resolve(model)), None
    merged_digests(source.path)  # refuses a damaged quantkit.json now, not at the end of the run
    check_cache(recipe, source.config)
    family, discovery = find_model(source)
    if adapter is not None:
        merging = read_adapter(adapter, ModelReader.of(source, family))
        refuse_merged(source.path, merging.digest, merging.path.name)
        source = merged(source, merging, family)
    if discovery is not None and discovery.obstacle and recipe.calibration is not None:
        raise ModelError(
            f"{source.path}: {discovery.name} cannot be calibrated layer by layer: {discovery.obstacle}; use a recipe "
            "without calibration data, such as rtn-int4, rtn-int8 or fp8-dynamic"
        )
    # With the description of MTP heads, readers split the stacked experts of a head into single linears.
    mtp = None if recipe.mtp is None else find_heads(source.config, source.names).data
    return source, replace(family, mtp=mtp), discovery, merging


def _of_source(reader: ModelReader, adapter: Adapter | None) -> tuple[str, ...]:
    """Return warnings about the source and the adapter. The note that an adapter is merged is not a warning."""
    if adapter is None:
        return reader.notes
    return (*(note for note in reader.notes if note != merge_note(adapter)), *adapter.warnings)


def _of_heads(recipe: Recipe, parts: Sequence[LayerLinears]) -> tuple[str, ...]:
    """Return a warning if the recipe quantizes MTP heads, but the model has none."""
    if recipe.mtp is None or any(part.is_head for part in parts):
        return ()
    return ("mtp has no effect: the model has no MTP head that quantkit can quantize; remove mtp from the recipe",)


def _layer_linears(skeleton: Skeleton) -> list[LayerLinears]:
    """Return the linears of each decoder layer."""
    return [
        LayerLinears(skeleton.layer_name(i), skeleton.linear_shapes(i), skeleton.linear_sets(i))
        for i in range(skeleton.num_layers)
    ]


def _target(model: str | None, source: CheckpointReader, recipe: Recipe, output: str | Path | None) -> Path:
    """Return the output folder, after checking early that it can be created and that all files to copy exist."""
    is_folder = model is not None and Path(model).is_dir()
    short = source.path.resolve().name if is_folder else Path(model or "demo").name
    target = Path(output) if output else Path(f"{short}-{recipe.name}")
    check_apart(target, source.path)
    metadata_files(source.path)
    return target


def _stored_in(reader: ModelReader, name: str) -> LinearScheme | None:
    """Return the scheme of a linear's codes in the source; None if the source stores it unquantized."""
    return reader.stored_scheme(f"{name}.weight")


def find_model(reader: CheckpointReader) -> tuple[Family, Discovery | None]:
    """Find the family of a checkpoint's model; without a family file, discover the model's structure.

    Args:
        reader: reader of the checkpoint.
    Returns:
        The family, and the discovered structure; the structure is None if a file describes the family.
    Raises:
        ModelError: config.json names no class.
    """
    try:
        return find(reader.config), None
    except NotNative:
        discovery = discover(reader)
        return discovery.family, discovery


def _open(source: CheckpointReader, family: Family, recipe: Recipe, *, described: bool) -> ModelReader:
    """Return a reader of the model that the steps work on. A step that replaces the model, such as `rotate`, needs a
    family file, because only such a file states what the model computes.
    """
    for name, step in recipe.steps.items():
        if step.replaces_model:
            if not described:
                raise ModelError(
                    f"{source.path}: the step {name} needs a family file, and this model has none; leave the step out"
                )
            return step.open(source, family)
    return ModelReader.of(source, family)


def _open_towers(source: CheckpointReader, skeleton: Skeleton) -> tuple[ModelReader, Skeleton]:
    """Open the model again, now with the tensors of its towers under the names of their modules."""
    family = with_tower_names(skeleton.family, source)
    reader = ModelReader.of(source, family)
    return reader, Skeleton(reader, family, skeleton.dtype, skeleton.device)


def _tower_linears(skeleton: Skeleton, reader: ModelReader) -> list[LayerLinears]:
    """Return the linears of towers, grouped by the module that contains them. A linear that the files store under
    a different name or in a different shape is left out.
    """
    owners: dict[str, dict[str, tuple[int, int]]] = {}
    for name, shape in skeleton.tower_linears().items():
        owner, _, leaf = name.rpartition(".")
        if _holds(reader, f"{name}.weight", shape):
            owners.setdefault(owner, {})[leaf] = shape
    return [LayerLinears(owner, shapes, (), beside=True) for owner, shapes in owners.items()]


def _head_linears(reader: ModelReader) -> list[LayerLinears]:
    """Return the linears in the decoder layers of MTP heads that the files contain in the expected shapes.

    The projection of a head's two inputs stays unquantized, because engines build it that way.
    """
    stored, parts = find_heads(reader.config, reader.names), list[LayerLinears]()
    for head in stored.heads:
        assert stored.model is not None
        shapes = {
            name.removeprefix(head.block): (matrix.out_features, matrix.in_features)
            for matrix in head_tensors(stored.model, head).matrices
            for name in matrix.names
            if matrix.quantizable and name.startswith(head.block) and name != head.projection
        }
        shapes = {name: shape for name, shape in shapes.items() if _holds(reader, f"{head.block}{name}.weight", shape)}
        locals_ = {name.removeprefix(head.block).removesuffix(".weight") for name in reader.names}
        sets = stored.model.family.sets_of_layer(locals_.__contains__, stored.model.entries.entries)
        if shapes:
            parts.append(LayerLinears(head.block.removesuffix("."), shapes, sets, beside=True, is_head=True))
    return parts


def _holds(reader: ModelReader, weight: str, shape: tuple[int, int]) -> bool:
    return weight in reader.names and reader.info(weight).shape == shape


def _all_ignored(skeleton: Skeleton, layers: Sequence[LayerLinears], assigned: Sequence[Schemes]) -> tuple[str, ...]:
    """Return the full names of all linears without a scheme."""
    parts = list(zip(layers, assigned, strict=True))
    inside = [name for part, schemes in parts for name in _ignored(part, schemes)]
    quantized = {f"{part.name}.{name}" for part, schemes in parts for name, scheme in schemes.items() if scheme}
    names = dict.fromkeys((*inside, *skeleton.other_linears(), skeleton.family.head))
    return tuple(name for name in names if name not in quantized)


def _ignored(layer: LayerLinears, schemes: Schemes) -> list[str]:
    """Return the full names of a layer's linears without a scheme, and of modules that are never quantized."""
    names = [name for name, scheme in schemes.items() if scheme is None]
    names += [name for group in layer.sets for name in group.beside]
    return [f"{layer.name}.{name}" for name in names]


def pick_compute_dtype(source: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the source's dtype if the device computes fast in it, else float32."""
    return source if device.type == "cuda" or source == fast_cpu_dtype() else torch.float32


def _source_dtype(reader: CheckpointReader, family: Family) -> torch.dtype:
    """Return the widest dtype of the decoder layers' weights, which must all be floats."""
    names = [name for name in reader.names if name.startswith(f"{family.layers}.") and name.endswith(".weight")]
    if not names:
        raise ModelError(
            f"{reader.path}: the checkpoint has no decoder layers: no tensor name begins with {family.layers}."
        )
    for name in names:
        if reader.info(name).dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"{reader.path}: tensor {name} is {reader.info(name).dtype}; "
                "weights must be float32, bfloat16 or float16 to be compressed"
            )
    return reduce(torch.promote_types, (reader.info(name).dtype for name in names))


def predicted_bytes(plan: Plan, num_tokens: int) -> dict[str, int]:
    """Estimate the peak memory of a run in bytes, keyed by purpose; see `algorithms.base.steps_bytes`.

    Args:
        plan: plan of the run.
        num_tokens: number of calibration tokens whose hidden states are in memory.
    """
    layers = [plan.skeleton.linear_shapes(index).values() for index in range(plan.skeleton.num_layers)]
    num_states = num_tokens * plan.skeleton.hidden_size
    steps, element_bytes = plan.recipe.steps.values(), plan.skeleton.dtype.itemsize
    hands_on = plan.family.hands_on or plan.recipe.has_images
    return steps_bytes(steps, layers, element_bytes, num_states, hands_on=hands_on)
