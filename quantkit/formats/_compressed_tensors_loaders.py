"""What loaders of compressed-tensors can do with linears that a model does not keep as linears, such as experts.

Facts about transformers 5.23 with compressed-tensors 0.20, and vLLM.
Source: transformers `integrations/compressed_tensors.py` (CompressedTensorsDequantize), vLLM `compressed_tensors_moe`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quantkit.errors import SchemeError
from quantkit.models.linear_sets import find_expert
from quantkit.numerics.scheme import LinearScheme

if TYPE_CHECKING:
    from quantkit.models.family import Family


def check_compressed_model(family: Family, layers: Sequence[Mapping[str, LinearScheme]]) -> tuple[str, ...]:
    """Refuse what no loader takes; say what some do not take. See `Format.check_model`."""
    name = family.hf_names[0]
    if family.decode_at_load:
        return _check_decoded(name, {scheme for layer in layers for scheme in layer.values()})
    experts = {scheme for layer in layers for linear, scheme in layer.items() if find_expert(linear)}
    return _check_experts(name, experts, loads=family.compressed_experts)


def _check_decoded(family: str, schemes: set[LinearScheme]) -> tuple[str, ...]:
    if len(schemes) > 1:
        raise SchemeError(
            f"weights of {family} are decoded while loading, which transformers does by one scheme: "
            "give all linears the same numbers (ignoring some is fine), or set format=dense"
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
