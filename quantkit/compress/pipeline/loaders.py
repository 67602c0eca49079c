"""What loaders of a format can do with linears that a model does not keep as linears: experts, transposed weights.

Facts about transformers 5.23 with compressed-tensors 0.20 and vLLM, which no format can know by itself.
Source: transformers `integrations/compressed_tensors.py` (CompressedTensorsDequantize), vLLM
`compressed_tensors_moe`, `models/gpt2.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.errors import SchemeError
from quantkit.models.families import Family, find_expert
from quantkit.numerics.scheme import LinearScheme

_COMPRESSED = "compressed-tensors"
# Their readers know a Conv1D, or there are no codes to know.
_HOLD_TRANSPOSED = ("dense", "gptq", "gptq_v2")


def check_loaders(family: Family, layers: Sequence[Mapping[str, LinearScheme]], format_name: str) -> tuple[str, ...]:
    """Refuse what no loader takes; say what some do not take.

    Args:
        family: of the model.
        layers: scheme of each linear to quantize by relative name, per layer.
        format_name: of the recipe.
    Returns:
        warnings, one sentence each.
    Raises:
        SchemeError: says which recipe field to change.
    """
    name = family.hf_names[0]
    if family.transposed and format_name not in _HOLD_TRANSPOSED:
        raise SchemeError(
            f"{name} keeps its linears as Conv1D, which readers of {format_name} do not find: "
            f"set format to one of {', '.join(_HOLD_TRANSPOSED)}"
        )
    if format_name != _COMPRESSED:
        return ()
    if family.decode_at_load:
        return _check_decoded(name, {scheme for layer in layers for scheme in layer.values()})
    return _check_experts(
        name,
        {scheme for layer in layers for linear, scheme in layer.items() if find_expert(linear)},
        loads=family.compressed_experts,
    )


def decode_at_load(described: dict[str, Any], family: Family) -> dict[str, Any]:
    """What a format says in config.json, with the wish that transformers decode the weights while loading.

    Args:
        described: by the format.
        family: of the model; most need no such thing.
    """
    section = described.get("quantization_config", {})
    if not family.decode_at_load or section.get("quant_method") != _COMPRESSED:
        return described
    return {**described, "quantization_config": {**section, "dequantize": True}}


def _check_decoded(family: str, schemes: set[LinearScheme]) -> tuple[str, ...]:
    if len(schemes) > 1:
        raise SchemeError(
            f"weights of {family} are decoded while loading, which transformers does by one scheme: "
            "give all linears the same numbers (leaving some alone is fine), or set format=dense"
        )
    if any(scheme.activation is not None for scheme in schemes):
        return (f"transformers decodes weights of {family} while loading and leaves activations as they are",)
    return ()


def _check_experts(family: str, schemes: set[LinearScheme], *, loads: bool) -> tuple[str, ...]:
    if any(not scheme.weight.symmetric for scheme in schemes):
        raise SchemeError(
            "experts with zero points load neither in transformers nor in vLLM: set weights.symmetric=true, "
            "or format=dense"
        )
    if schemes and not loads:
        return (
            f"transformers does not load compressed experts of {family}, whoever wrote them; for it set format=dense",
        )
    if any(scheme.activation is not None and scheme.weight.dtype.kind == "int" for scheme in schemes):
        return ("transformers does not load INT8 experts with INT8 activations; engines such as vLLM do",)
    if len(schemes) > 1:
        return ("transformers decodes all experts by one scheme, and these have several; vLLM does not",)
    return ()
