"""Check, before any tensor is written, whether a format can store a checkpoint; if not, find formats that can."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoints.mtp_heads import unquantized_prefixes
from quantkit.compress.convert.source import Source
from quantkit.errors import ModelError, SchemeError, located
from quantkit.formats import REGISTRY
from quantkit.formats.base import Format, unquantized_modules
from quantkit.models.families import find
from quantkit.models.linear_sets import fused_conflicts
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.quantities import dtype_name

_EMBEDDING = "embed_tokens"  # for families that quantkit does not know


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Description of the checkpoint to write.

    Args:
        format: format on disk.
        linears: scheme of each linear to write. It is the source's scheme, with zero points (all 0) added if the format
            always stores zero points.
        ignored: full names of the unquantized linears; see `Format.config`.
        group_order: whether the groups of some linear are in activation order instead of the order of its inputs.
    """

    format: Format
    linears: dict[str, LinearScheme]
    ignored: tuple[str, ...]
    group_order: bool


def target_for(source: Source, format_: Format) -> Target:
    """Check that a format can store a checkpoint, and describe the checkpoint to write.

    Args:
        source: a quantized checkpoint.
        format_: format to write.
    Raises:
        SchemeError: the format cannot store the checkpoint exactly; the message names the module, and
            the formats that can store the checkpoint.
    """
    # The values of a GGUF file can be written even if no linear in it is quantized.
    if not source.linears and (source.dense is None or format_.keeps_codes):
        raise SchemeError(
            f"{source.reader.path} is not quantized, so it has no codes to convert; use `quantkit quantize`, "
            "or convert it with --to gguf"
        )
    try:
        return _check(source, format_)
    except SchemeError as error:
        raise unfit(source, format_, error) from None


def unfit(source: Source, refused: Format, error: SchemeError) -> SchemeError:
    """Return an error that says why a format cannot store a checkpoint, and which formats can."""
    others = [other for other in REGISTRY.all().values() if other not in (refused, source.format)]
    holding = [other for other in others if _works(source, other)]
    codes = ", ".join(other.name for other in holding if other.keeps_codes)
    values = "".join(f"; {other.name} can store their values" for other in holding if not other.keeps_codes)
    hint = f"formats that can store it: {codes}" if codes else f"no other format can store the codes{values}"
    return SchemeError(f"format {refused.name} cannot store {source.reader.path}: {error}; {hint}")


def kv_cache_scheme(source: Source) -> Any:
    """Return the entry of config.json for calibrated KV-cache scales; None if there is none."""
    section = source.reader.config.get("quantization_config")
    return section.get("kv_cache_scheme") if isinstance(section, Mapping) else None


def as_written(weight: QuantizedTensor, scheme: LinearScheme, format_: Format) -> QuantizedTensor:
    """Adapt a weight to the target's scheme: if needed, add zero points of 0, convert scales to a dtype of the format,
    and repeat scales for smaller groups.

    Args:
        weight: weight decoded from the source.
        scheme: scheme of the linear in the target; it has the same codes.
        format_: format of the target.
    Raises:
        SchemeError: no dtype of the format can store the scales exactly, or a zero point is out of range.
    """
    zero = weight.zero_point
    if zero is None and not scheme.weight.symmetric:
        zero = torch.zeros(weight.scale.shape, dtype=torch.int8)
    if zero is not None and scheme.weight.dtype.kind == "int":
        low, high = int(scheme.weight.dtype.minimum), int(scheme.weight.dtype.maximum)
        if not low <= int(zero.min()) <= int(zero.max()) <= high:
            limits, name = f"{int(zero.min())} to {int(zero.max())}", scheme.weight.dtype.name
            raise SchemeError(f"zero points range from {limits}, but {name} only holds {low} to {high}")
    scale = storable(weight.scale, format_)
    if format_.keeps_codes and (parts := scheme.weight.num_groups(weight.shape[1]) // scale.shape[1]) > 1:
        scale = scale.repeat_interleave(parts, dim=1)
        zero = zero if zero is None else zero.repeat_interleave(parts, dim=1)
    # A format that stores values gets the groups of the decoded weight, which may be finer than config.json says.
    numbers = scheme.weight if format_.keeps_codes else weight.scheme
    return replace(weight, zero_point=zero, scheme=numbers, scale=scale)


def _check(source: Source, format_: Format) -> Target:
    linears, reordered = {}, False
    for module, scheme in source.linears.items():
        with located(module):
            if source.dense is not None and format_.keeps_codes and not scheme.weight.symmetric:
                raise SchemeError("only GGUF can store minimums that are not whole multiples of the scales")
            linears[module] = _adapt(scheme, source.shape(module), format_)
            reordered = refuse_reordered(source, module, format_) or reordered
            scale = f"{module}.{source.format.scale_name}"
            dtype = source.reader.info(scale).dtype if scale in source.reader else torch.uint8
            # If the format does not store this dtype, read the scales: their values may still convert exactly.
            if dtype.is_floating_point and dtype not in format_.scale_dtypes:
                storable(source.reader.tensor(scale), format_)
    if format_.keeps_codes:  # values have no schemes that could differ
        _check_fused(source, linears)
    if kv_cache_scheme(source) is not None and format_ is not source.format:
        raise SchemeError(
            f"the checkpoint has calibrated KV-cache scales, which only {source.format.name} can record in config.json"
        )
    ignored = tuple(dict.fromkeys(_ignored(source)))
    format_.model_config(source.reader.config)
    # Called for its checks, because the format may support each scheme but not all of them together.
    format_.config(linears, ignored, group_order=reordered)
    return Target(format=format_, linears=linears, ignored=ignored, group_order=reordered)


def refuse_reordered(source: Source, module: str, format_: Format) -> bool:
    """Whether the groups of a linear are in activation order, which differs from the order of its inputs.

    Raises:
        SchemeError: the order differs, and the format cannot store it.
    """
    reordered = source.is_reordered(module)
    if reordered and not format_.holds_group_index:
        raise SchemeError(f"the groups of the weight are in activation order, which {format_.name} cannot store")
    return reordered


def _works(source: Source, format_: Format) -> bool:
    try:
        _check(source, format_)
    except SchemeError:
        return False
    return True


def _adapt(scheme: LinearScheme, shape: tuple[int, int] | None, format_: Format) -> LinearScheme:
    """Return the scheme under which the format can store these codes: a symmetric weight may get zero points of 0, and
    groups may be split.
    """
    # An unknown shape passes every check of divisibility; it is checked again after decoding.
    size = shape or (0, 0)
    try:
        format_.check(scheme, size)
        return scheme
    except SchemeError:
        if scheme.weight.dtype.kind != "int" or scheme.weight.block_rows != 1:
            raise
        width = scheme.weight.group_size or size[1]
        group_size = next((own for own in format_.group_sizes if width % own == 0), scheme.weight.group_size)
        adapted = replace(scheme, weight=replace(scheme.weight, symmetric=False, group_size=group_size))
        with suppress(SchemeError):
            format_.check(adapted, size)
            return adapted
        raise


def storable(scale: Tensor, format_: Format) -> Tensor:
    """Convert scales exactly to a dtype that the format supports.

    Raises:
        SchemeError: no such dtype can store all values.
    """
    if scale.dtype in format_.scale_dtypes:
        return scale
    for dtype in format_.scale_dtypes:
        cast = scale.to(dtype)
        if torch.equal(cast.to(torch.float64), scale.to(torch.float64)):
            return cast
    dtypes = " or ".join(dtype_name(dtype) for dtype in format_.scale_dtypes)
    other = format_.name if format_.is_recipe_format else "gptq-v2"  # it has 16-bit scales, too
    raise SchemeError(
        f"its scales are {str(scale.dtype).removeprefix('torch.')} and would be rounded to {dtypes}; "
        f"quantize the original model with --format {other} instead"
    )


def _check_fused(source: Source, linears: Mapping[str, LinearScheme]) -> None:
    """Check that linears that engines fuse share one scheme, and that a head tied to the embedding is unquantized."""
    config = source.reader.config
    try:
        family = find(config)
    except (ModelError, TypeError):  # not checked for a family that quantkit does not know
        return
    for layer, modules in source.layers():
        here = {name.removeprefix(f"{layer}."): linears.get(name) for name in modules} if layer else {}
        for conflict in fused_conflicts(family.sets_of_layer(here.__contains__), here):
            raise SchemeError(f"{layer}: {conflict}")
    if config.get("tie_word_embeddings") and family.head in linears:
        raise SchemeError(f"{family.head} is quantized but tied to the embedding, which loaders do not support")


def _ignored(source: Source) -> Iterator[str]:
    """Yield the names of the unquantized linears in and outside the layers, including the head, MTP heads and towers,
    but not the embedding.
    """
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
    yield from unquantized_prefixes(source.reader.config, source.reader.names, source.linears)
