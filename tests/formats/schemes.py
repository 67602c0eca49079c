"""Schemes and tensors that the tests of formats share."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats._compressed_tensors_config import _packs_densely
from quantkit.numerics.affine import minmax_parameters, round_to_nearest
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor


def linear(
    dtype: str, group_size: int | None = None, symmetric: bool = True, inputs: str | None = None
) -> LinearScheme:
    activation = None if inputs is None else ActivationScheme(dtype=DTYPES[inputs])
    return LinearScheme(
        weight=WeightScheme(dtype=DTYPES[dtype], group_size=group_size, symmetric=symmetric), activation=activation
    )


SCHEMES = {
    "int4-g32": linear("int4", 32),
    "int4-g32-asym": linear("int4", 32, symmetric=False),
    "int8-channel": linear("int8"),
    "int8-g32-asym": linear("int8", 32, symmetric=False),
    "int3-g32": linear("int3", 32),
    "int3-channel-asym": linear("int3", symmetric=False),
    "int2-g16": linear("int2", 16),
    "fp8": linear("fp8"),
    "fp8-dynamic": linear("fp8", inputs="fp8"),
    "w8a8": linear("int8", inputs="int8"),
}
if not _packs_densely():  # an old library, which cannot hold them
    SCHEMES = {name: scheme for name, scheme in SCHEMES.items() if scheme.weight.dtype.bits != 3}


def quantize(weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype = torch.float32) -> QuantizedTensor:
    """Rounded to nearest with the covering range."""
    scale, zero_point = minmax_parameters(weight, scheme, scale_dtype)
    return round_to_nearest(weight, scheme, scale, zero_point, scale_dtype)


def random_tensor(seed: int, shape: tuple[int, int], scheme: WeightScheme, scale_dtype: torch.dtype) -> QuantizedTensor:
    """Every code and zero point may occur, not only those that rounding makes."""
    generator = torch.Generator().manual_seed(seed)
    low, high, groups = int(scheme.dtype.minimum), int(scheme.dtype.maximum) + 1, scheme.num_groups(shape[1])
    codes = torch.randint(low, high, shape, generator=generator).to(scheme.dtype.storage)
    zero = None
    if not scheme.symmetric:
        zero = torch.randint(low, high, (shape[0], groups), generator=generator).to(torch.int8)
    scale = (torch.rand(shape[0], groups, generator=generator) + 0.1).to(scale_dtype)
    return QuantizedTensor(codes=codes, scale=scale, zero_point=zero, scheme=scheme)
