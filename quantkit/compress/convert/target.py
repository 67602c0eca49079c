"""Whether a format can hold what a checkpoint has, known before the first tensor is written, and what can if not."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.compress.convert.source import Source
from quantkit.errors import ModelError, SchemeError, located
from quantkit.formats import REGISTRY
from quantkit.formats.base import Format, unquantized_modules
from quantkit.models.families import find
from quantkit.models.linear_sets import fused_conflicts
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.quantities import dtype_name

_EMBEDDING = "embed_tokens"  # of a family that quantkit does not know


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Content of the new checkpoint.

    Args:
        format: on disk.
        linears: scheme of each linear as it will be written: that of the source, or the same codes with zero points
            of 0 where the format always has zero points.
        ignored: full names of linears that stay as they are.
        group_order: whether groups of some linear follow another order than that of the inputs.
    """

    format: Format
    linears: dict[str, LinearScheme]
    ignored: tuple[str, ...]
    group_order: bool


def target_for(source: Source, format_: Format) -> Target:
    """Check a checkpoint against a format.

    Args:
        source: the checkpoint, quantized.
        format_: to write.
    Raises:
        SchemeError: the format would lose something; says what, for which module, and which formats would not.
    """
    if not source.linears:
        raise SchemeError(
            f"{source.reader.path} is not quantized, so it has no codes to convert; use `quantkit quantize`, "
            "or convert it with --to gguf"
        )
    try:
        return _check(source, format_)
    except SchemeError as error:
        raise unfit(source, format_, error) from None


def unfit(source: Source, refused: Format, error: SchemeError) -> SchemeError:
    """Return the error for a format that cannot hold a checkpoint: the reason, and the formats that can."""
    others = [other for other in REGISTRY.all().values() if other not in (refused, source.format)]
    holding = [other for other in others if _works(source, other)]
    codes = ", ".join(other.name for other in holding if other.keeps_codes)
    values = "".join(f"; {other.name} holds their values" for other in holding if not other.keeps_codes)
    hint = f"these hold all of it: {codes}" if codes else f"no other format holds the codes{values}"
    return SchemeError(f"{source.reader.path} does not fit format {refused.name}: {error}; {hint}")


def kv_cache_scheme(source: Source) -> Any:
    """Entry of config.json about calibrated scales of the KV cache; None when it has none."""
    section = source.reader.config.get("quantization_config")
    return section.get("kv_cache_scheme") if isinstance(section, Mapping) else None


def as_written(weight: QuantizedTensor, scheme: LinearScheme, format_: Format) -> QuantizedTensor:
    """The weight as a target's scheme has it: zero points of 0 added, scales in a dtype of the format.

    Args:
        weight: as decoded from the source.
        scheme: of the target, which holds the same codes.
        format_: of the target.
    Raises:
        SchemeError: a scale that no dtype of the format holds exactly.
    """
    zero = weight.zero_point
    if zero is None and not scheme.weight.symmetric:
        zero = torch.zeros(weight.scale.shape, dtype=torch.int8)
    if zero is not None and scheme.weight.dtype.kind == "int":
        low, high = int(scheme.weight.dtype.minimum), int(scheme.weight.dtype.maximum)
        if not low <= int(zero.min()) <= int(zero.max()) <= high:
            raise SchemeError(f"a zero point of {int(zero.max())} is outside {scheme.weight.dtype.name}")
    # A format that keeps values only takes groups as they were decoded, which may be finer than config.json says.
    numbers = scheme.weight if format_.keeps_codes else weight.scheme
    return replace(weight, zero_point=zero, scheme=numbers, scale=_storable(weight.scale, format_))


def _check(source: Source, format_: Format) -> Target:
    linears, reordered = {}, False
    for module, scheme in source.linears.items():
        with located(module):
            linears[module] = _adapt(scheme, source.shape(module), format_)
            reordered = refuse_reordered(source, module, format_) or reordered
            scale = f"{module}.{source.format.scale_name}"
            dtype = source.reader.info(scale).dtype if scale in source.reader else torch.uint8
            # Read early only where the dtype does not settle it: scales of another type may still have values that fit.
            if dtype.is_floating_point and dtype not in format_.scale_dtypes:
                _storable(source.reader.tensor(scale), format_)
    _check_fused(source, linears)
    if kv_cache_scheme(source) is not None and format_ is not source.format:
        raise SchemeError(
            f"it has calibrated scales of the KV cache, which only {source.format.name} says in config.json"
        )
    ignored = tuple(dict.fromkeys(_ignored(source)))
    # For its refusals: schemes that fit alone may not go together.
    format_.config(linears, ignored, group_order=reordered)
    return Target(format=format_, linears=linears, ignored=ignored, group_order=reordered)


def refuse_reordered(source: Source, module: str, format_: Format) -> bool:
    """Whether groups of a linear follow another order than that of the inputs.

    Raises:
        SchemeError: they do, and the format cannot store it.
    """
    reordered = source.is_reordered(module)
    if reordered and not format_.holds_group_index:
        raise SchemeError(f"its groups are in activation order, which {format_.name} cannot store")
    return reordered


def _works(source: Source, format_: Format) -> bool:
    try:
        _check(source, format_)
    except SchemeError:
        return False
    return True


def _adapt(scheme: LinearScheme, shape: tuple[int, int] | None, format_: Format) -> LinearScheme:
    """The scheme under which the format holds these codes: a symmetric weight is one whose zero points are 0."""
    # An unknown shape passes as one that everything divides; it is checked again once the weight is decoded.
    size = shape or (0, 0)
    try:
        format_.check(scheme, size)
        return scheme
    except SchemeError:
        if not scheme.weight.symmetric or scheme.weight.dtype.kind != "int":
            raise
        adapted = replace(scheme, weight=replace(scheme.weight, symmetric=False))
        with suppress(SchemeError):
            format_.check(adapted, size)
            return adapted
        raise


def _storable(scale: Tensor, format_: Format) -> Tensor:
    """Convert scales to a dtype that the format takes, without loss.

    Raises:
        SchemeError: none of them holds all values.
    """
    if scale.dtype in format_.scale_dtypes:
        return scale
    for dtype in format_.scale_dtypes:
        cast = scale.to(dtype)
        if torch.equal(cast.to(torch.float64), scale.to(torch.float64)):
            return cast
    dtypes = " or ".join(dtype_name(dtype) for dtype in format_.scale_dtypes)
    raise SchemeError(
        f"its scales are {str(scale.dtype).removeprefix('torch.')} and would be rounded to {dtypes}; "
        "quantize the model with this --format from the start"
    )


def _check_fused(source: Source, linears: Mapping[str, LinearScheme]) -> None:
    """Linears that engines fuse have one scheme, and a head tied to the embedding is not quantized."""
    config = source.reader.config
    try:
        family = find(config)
    except (ModelError, TypeError):  # a family that quantkit does not know is converted as it is
        return
    for layer, modules in source.layers():
        here = {name.removeprefix(f"{layer}."): linears.get(name) for name in modules} if layer else {}
        for conflict in fused_conflicts(family.sets_of_layer(here.__contains__), here):
            raise SchemeError(f"{layer}: {conflict}")
    if config.get("tie_word_embeddings") and family.head in linears:
        raise SchemeError(f"{family.head} is quantized but tied to the embedding, which loaders do not take")


def _ignored(source: Source) -> Iterator[str]:
    """Linears that are not quantized, in layers and outside of them (MTP, towers), and the head; not the embedding."""
    yield "lm_head"
    try:
        embedding = find(source.reader.config).embedding
    except (ModelError, TypeError):
        embedding = _EMBEDDING
    for module in source.modules:
        if module in source.linears or module.endswith(embedding.rpartition(".")[2]):
            continue
        for name in source.names(module):
            yield from unquantized_modules(name, source.reader.info(name).shape)
