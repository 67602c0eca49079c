"""Quantized weights, and how near a product of one has to be."""

from __future__ import annotations

import torch

from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import WeightScheme

CPU = torch.device("cpu")


def quantized(name, group, symmetric, shape):
    scheme = WeightScheme(dtype=DTYPES[name], group_size=group, symmetric=symmetric)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 0.2
    return round_to_nearest(values, WeightGrid(scheme, torch.float16))


def check(actual, inputs, decoded, bias=0.0):
    expected = inputs.double() @ decoded.double().T + bias
    ulp = torch.finfo(actual.dtype).eps
    bound = ulp * expected.abs() + 2.0**-20 * (inputs.double().abs() @ decoded.double().abs().T)
    assert ((actual.double() - expected).abs() <= bound).all()
