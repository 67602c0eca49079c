"""Rules of compressed-tensors: which of its formats holds a scheme, and which models loaders support.

A scheme must be supported by the library and by the engines that load the checkpoint. A scheme is refused if only the
library supports it.
Source: compressed-tensors `compressors/format.py`, `quantization/quant_scheme.py` (presets); vLLM
`layers/quantization/compressed_tensors/{compressed_tensors,compressed_tensors_moe}.py`. Limits of
a single engine are in `quantkit.engine_rules`.
The library is imported inside the functions that need it, so reading other formats neither requires nor loads it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from quantkit.engine_rules import CPU, StoredLinear, StoredModel, judge
from quantkit.errors import SchemeError
from quantkit.models.linear_sets import find_expert
from quantkit.numerics.dtype import FP8, INT4, INT8, MXFP4, MXFP8, NVFP4
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, WeightScheme

if TYPE_CHECKING:
    from quantkit.models.family import Family

NAME = "compressed-tensors"
PACKED, INTEGER, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
MICROSCALING = {
    NVFP4.name: "nvfp4-pack-quantized",
    MXFP4.name: "mxfp4-pack-quantized",
    MXFP8.name: "mxfp8-quantized",
}
MIXED = "mixed-precision"  # several of these formats in one checkpoint
READABLE = (PACKED, INTEGER, FLOAT, "naive-quantized", MIXED, *MICROSCALING.values())
_DENSE_PACKING_SINCE = "0.18"


def find_layout(scheme: LinearScheme) -> str:
    """Return the name of the compressed-tensors format that holds this scheme.

    Raises:
        SchemeError: no format holds the scheme; the message names the recipe field to change.
    """
    weight, activation = scheme.weight, scheme.activation
    if weight.dtype.kind == "float":
        _check_float(scheme)
        return MICROSCALING.get(weight.dtype.name, FLOAT)
    _check_integer(weight)
    if activation is None:
        return PACKED
    four_bits = weight.dtype == INT4 and weight.symmetric and weight.block_rows == 1
    # Kernels for FP8 inputs read codes packed into words; kernels for INT8 inputs read one code per byte.
    if four_bits and activation == ActivationScheme(dtype=FP8):
        return PACKED
    eight_bits = weight.dtype == INT8 and weight.group_size is None and weight.symmetric
    multiplied = eight_bits or (four_bits and activation.dynamic)
    if multiplied and activation.dtype == INT8 and activation.group_size is None:
        return INTEGER
    name = activation.dtype.name
    hint = f"set weights.dtype to {name}" if activation.dtype.kind == "float" else "set activations.dtype to int8"
    if activation.dtype == INT8:
        hint = "set weights.dtype to int8 with weights.group_size 'channel'"
    if activation.dtype in (INT8, FP8):
        hint += ", or to symmetric int4 with dynamic activations"
    raise SchemeError(
        f"{activation.describe()} activations cannot be combined with {weight.describe()} weights; {hint}; or leave "
        "activations out"
    )


def _check_float(scheme: LinearScheme) -> None:
    """Refuse float schemes that engines have no kernels for, and types that the installed library does not know."""
    weight, activation = scheme.weight, scheme.activation
    name, is_scaled_by_floats = weight.dtype.name, weight.dtype.scale == "float"
    if is_scaled_by_floats and (weight.dtype != FP8 or (weight.group_size is not None and weight.block_rows == 1)):
        raise SchemeError(
            f"compressed-tensors stores {name} weights with one scale per channel, tensor or block, "
            f"not {weight.describe()}; set weights.group_size to 'channel', 'tensor' or 128x128"
        )
    if activation is not None and activation.dtype != weight.dtype:
        raise SchemeError(
            f"{activation.dtype.name} activations cannot be combined with {name} weights; "
            f"set activations.dtype to {name} or leave activations out"
        )
    if not is_scaled_by_floats and MICROSCALING[name] not in library_formats():
        raise SchemeError(
            f"{name} needs a newer compressed-tensors (installed: {library_version()}); "
            "run pip install -U compressed-tensors"
        )
    if is_scaled_by_floats and activation is not None and activation.group_size and weight.block_rows == 1:
        raise SchemeError(
            f"activations in groups of {activation.group_size} require weights in blocks; set weights.group_size to "
            f"{activation.group_size}x{activation.group_size}, or leave activations.group_size out"
        )


def _check_integer(weight: WeightScheme) -> None:
    if weight.block_rows != 1 and (weight.dtype != INT8 or weight.block_rows is not None):
        raise SchemeError(
            f"compressed-tensors stores {weight.dtype.name} weights in groups or per channel, not {weight.describe()}; "
            "set weights.group_size to a number or 'channel'"
        )
    if 32 % weight.dtype.bits and not packs_densely():
        raise SchemeError(
            f"{weight.dtype.bits}-bit weights need compressed-tensors>={_DENSE_PACKING_SINCE}, which packs them "
            f"without unused bits (installed: {library_version()}); run pip install -U compressed-tensors"
        )


def library_version() -> str:
    """Return the version of the installed library; the library writes it into config.json."""
    import compressed_tensors

    return str(compressed_tensors.__version__)


def library_formats() -> tuple[str, ...]:
    """Return the names of the formats that the installed library knows."""
    from compressed_tensors.config import CompressionFormat

    return tuple(item.value for item in CompressionFormat)


@functools.cache
def packs_densely() -> bool:
    """Whether the installed library packs 3-bit codes without unused bits: 64 codes in 6 words, not 7."""
    from compressed_tensors.compressors import pack_to_int32

    return bool(pack_to_int32(torch.zeros(1, 64, dtype=torch.int8), 3).shape[1] == 6)


def check_compressed_model(family: Family, layers: Sequence[Mapping[str, LinearScheme]]) -> tuple[str, ...]:
    """Refuse schemes that no loader supports, and return warnings about schemes that some loaders do not support.

    See `Format.check_model`.
    """
    name = family.hf_names[0] if family.hf_names else "this family"
    if family.decode_at_load:
        return _check_decoded(name, {scheme for layer in layers for scheme in layer.values()})
    experts = {scheme for layer in layers for linear, scheme in layer.items() if find_expert(linear)}
    if family.experts is not None and not any(layers):
        return ("transformers cannot load experts if only the KV cache is quantized; quantkit's own LLM can",)
    return _check_experts(experts, loads=family.compressed_experts) if experts else ()


def _check_decoded(family: str, schemes: set[LinearScheme]) -> tuple[str, ...]:
    if len(schemes) > 1:
        raise SchemeError(
            f"transformers decodes the weights of {family} while loading and supports only one scheme for that; "
            "give all linears one scheme (ignoring some is fine), or set format=dense"
        )
    if any(scheme.activation is not None for scheme in schemes):
        return (f"transformers decodes the weights of {family} while loading and does not quantize activations",)
    return ()


def _check_experts(schemes: set[LinearScheme], *, loads: bool) -> tuple[str, ...]:
    """Return a warning if transformers reads experts differently from other linears, or if their schemes differ."""
    kinds = [[StoredLinear(scheme=scheme, expert=expert) for scheme in schemes] for expert in (True, False)]
    experts, others = (
        judge("transformers", StoredModel(format=NAME, linears=tuple(linears), compressed_experts=loads), CPU)
        for linears in kinds
    )
    if experts.reason != others.reason:
        return (f"{experts.engine} {experts.release}: {experts.reason}; quantkit's own LLM reads these experts",)
    if len(schemes) > 1:
        return ("transformers decodes all experts with one scheme, but these have several schemes; vLLM reads them",)
    return ()
