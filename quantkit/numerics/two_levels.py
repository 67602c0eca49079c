"""Codes of MXFP4 as those of NVFP4, exactly: the same codes, each group of 32 with one power of two as two of 16.

NVFP4's scales are 8-bit floats under one number for the tensor. Under a power of two as that number, 18 powers of two
in a row are such floats, the lowest three of them subnormal; what spans more has no exact form.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from quantkit.numerics.dtype import MXFP4, NVFP4
from quantkit.numerics.scheme import WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

# Exponents of the powers of two among 8-bit floats (E4M3).
_LOWEST, _HIGHEST = -9, 8
_FROM = WeightScheme(dtype=MXFP4, group_size=32)
_TO = WeightScheme(dtype=NVFP4, group_size=16)


def has_two_levels(scheme: WeightScheme, asked: WeightScheme) -> bool:
    """Whether codes of one scheme can be those of another one, as far as schemes can tell."""
    return (scheme, asked) == (_FROM, _TO)


def with_two_levels(weights: Sequence[QuantizedTensor]) -> list[QuantizedTensor] | None:
    """Weights in MXFP4 as NVFP4 of the same values, all under one number; None where their scales span too much.

    Args:
        weights: that share the number, as linears that engines fuse do.
    """
    used = [weight.codes.float().view(*weight.scale.shape, 32).ne(0).any(-1) for weight in weights]  # (N, G)
    exponents = [torch.log2(weight.scale.double()) for weight in weights]
    counted = torch.cat([exponent[own] for exponent, own in zip(exponents, used, strict=True)])
    highest = counted.amax() if counted.numel() else torch.zeros((), dtype=torch.float64)
    if counted.numel() and bool(counted.amin() < highest - (_HIGHEST - _LOWEST)):
        return None
    outer = torch.exp2(_HIGHEST - highest).float().reshape(1)
    if not torch.isfinite(outer).all() or not bool((outer > 0).all()):
        return None
    made = []
    for weight, exponent, own in zip(weights, exponents, used, strict=True):
        # Groups of zeros may have any scale.
        scale = torch.exp2(torch.where(own, exponent, highest)).float().repeat_interleave(2, dim=1)
        two = replace(weight, scheme=_TO, scale=scale, global_scale=outer, value_dtype=weight.values_dtype)
        made.append(two)
    return made
